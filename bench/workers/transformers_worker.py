"""transformers' `generate` in bfloat16, in padded batches of up to 32 in the order given. Argument: the GGUF file."""

from protocol import serve  # isort: skip (first: it keeps the output of engines out of the answers)

import sys
from pathlib import Path

import torch
import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
path = Path(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.bfloat16
).eval()
BATCH = 32


@torch.inference_mode()
def generate(requests):
    outputs = []
    for start in range(0, len(requests), BATCH):
        part = requests[start : start + BATCH]
        longest, steps = max(len(ids) for ids, _ in part), max(count for _, count in part)
        ids = torch.zeros(len(part), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(part):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=steps, max_new_tokens=steps, pad_token_id=0
        )
        outputs += [out[row, longest : longest + count].tolist() for row, (_, count) in enumerate(part)]
    return outputs


serve(f"transformers {transformers.__version__}", generate)
