"""Write the embedded model as a folder in Hugging Face's layout, bfloat16, for engines that cannot read GGUF.

python bench/export_safetensors.py .peers/smollm2-bf16
"""

import argparse
import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from treadle.core.config import DEFAULT_MODEL
from treadle.models.registry import find_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    path = find_model(DEFAULT_MODEL)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    # save_pretrained refuses a model that was read from a GGUF file.
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in model.config.to_dict().items() if k[0] != "_" and k != "quantization_config"}
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16", tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)
    print(f"written: {folder}")


if __name__ == "__main__":
    main()
