"""Architectures from other packages are found, loaded and run, or refused with an error that names them."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
import transformers

from support.engines import TestEngine, logits_of
from support.native import RUNNABLE, native_library
from support.oracles import assert_greedy, reference_logits
from support.tiny import SIZES, make_model, write_tokenizer
from treadle import SamplingParams
from treadle.backends.cpu.model import NativeModel
from treadle.backends.torch.model import TorchModel
from treadle.cli.main import main
from treadle.core.errors import ModelLoadError, UnsupportedModelError
from treadle.models.architectures import all_architectures
from treadle.models.registry import load_model

DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"
PROMPTS = [list(range(3, 3 + n)) for n in (1, 5, 33, 64)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install packages with one entry point each: (module, source, attribute, name of the entry point)."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    installed = []

    def install(module, source, attribute="ARCHITECTURE", entry=None):
        (site / f"{module}.py").write_text(textwrap.dedent(source))
        info = site / f"{module}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[treadle.architectures]\n{entry or module} = {module}:{attribute}\n")
        installed.append(module)

    yield install
    for module in installed:
        sys.modules.pop(module, None)


def example():
    """Return the example of docs/architecture.md: Phi-3, which stores several projections in one tensor."""
    return DOCS.read_text().split("```python\n# phi3.py\n")[1].split("```")[0]


def make_phi3(folder):
    """Write a tiny Phi-3 with random weights; return transformers' model of it."""
    torch.manual_seed(11)
    config = transformers.Phi3Config(**SIZES, sliding_window=400)
    model = transformers.Phi3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25) if parameter.dim() > 1 else parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def save_as_llama(model, folder):
    """Write the same weights as a Llama."""
    sizes = [SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["num_key_value_heads"]]
    head_dim = SIZES["hidden_size"] // SIZES["num_attention_heads"]
    state = {}
    for name, tensor in model.state_dict().items():
        for fused, parts, rows in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj"), [size * head_dim for size in sizes]),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj"), [SIZES["intermediate_size"]] * 2),
        ):
            if fused in name:
                places = [name.replace(fused.split(".")[1], part) for part in parts]
                state.update(zip(places, tensor.split(rows), strict=True))
                break
        else:
            state[name] = tensor
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, rms_norm_eps=model.config.rms_norm_eps)
    ).float()
    llama.load_state_dict(state)
    llama.save_pretrained(folder)
    write_tokenizer(folder)


def torch_model(loaded):
    return TorchModel(
        loaded.config, loaded.weights, dtype=torch.float32, device=torch.device("cpu"), max_model_len=512
    )


def generate(loaded, model):
    return TestEngine(loaded, model, max_model_len=400, max_num_batched_tokens=40).generate(PROMPTS, GREEDY)


def test_the_example_of_the_docs_equals_transformers(install, tmp_path):
    install("phi3", example())
    oracle = make_phi3(tmp_path)
    loaded = load_model(str(tmp_path))
    assert loaded.config.architecture == "Phi3ForCausalLM"
    assert loaded.config.sliding_window == oracle.config.sliding_window == 400
    model = torch_model(loaded)
    for prompt in PROMPTS:
        assert (logits_of(loaded, model, prompt) - reference_logits(oracle, prompt)).abs().max() < 1e-3
    for prompt, output in zip(PROMPTS, generate(loaded, model), strict=True):
        assert_greedy(oracle, prompt, output, eos_ids={2}, max_tokens=16)


@pytest.mark.skipif(not RUNNABLE, reason="this processor has no native kernels")
@pytest.mark.parametrize("int8", [False, True])
def test_the_native_kernels_compute_the_same_as_for_a_llama_with_the_same_weights(int8, install, tmp_path):
    install("phi3", example())
    save_as_llama(make_phi3(tmp_path / "phi3"), tmp_path / "llama")
    outputs = []
    for folder in ("phi3", "llama"):
        loaded = load_model(str(tmp_path / folder))
        library, form = native_library(), "int8" if int8 else "bfloat16"
        model = NativeModel(loaded.config, loaded.weights, library=library, weight_format=form, max_model_len=512)
        outputs.append(generate(loaded, model))
    assert outputs[0] == outputs[1]


def test_the_model_is_refused_without_the_package(tmp_path):
    make_phi3(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"Phi3ForCausalLM is not supported; supported are LlamaFor.*"):
        load_model(str(tmp_path))


def test_the_error_for_a_misshapen_tensor_gives_the_name_in_the_file(install, tmp_path):
    install("phi3", example())
    make_phi3(tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"intermediate_size": 80', '"intermediate_size": 96'))
    with pytest.raises(ModelLoadError, match=r"0\.mlp\.gate_up_proj.weight has shape \(160, 48\)"):
        torch_model(load_model(str(tmp_path)))


BROKEN = [
    ("raises", "raise RuntimeError('no such threads')", r"'raises' \(raises:ARCHITECTURE\).*: no such threads"),
    ("lacks", "", r"entry point 'lacks' .*of package lacks: AttributeError"),
    ("wrong", "ARCHITECTURE = {}", r"entry point 'wrong' .*must be a treadle.models.Architecture, not a dict"),
    (
        "twice",
        """
        from treadle.models import Architecture, CheckpointFormat
        ARCHITECTURE = Architecture(huggingface=CheckpointFormat(name="LlamaForCausalLM", spec=None))
        """,
        "entry point 'twice' .*there is another architecture 'LlamaForCausalLM'",
    ),
]


@pytest.mark.parametrize(("module", "source", "message"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_a_broken_entry_point_is_reported_and_affects_no_other_model(
    module, source, message, install, tmp_path, capsys
):
    install(module, source)
    install("phi3", example())
    make_model("llama3", tmp_path / "llama")
    make_phi3(tmp_path / "phi3")
    assert load_model(str(tmp_path / "llama")).config.architecture == "LlamaForCausalLM"
    assert load_model(str(tmp_path / "phi3")).config.architecture == "Phi3ForCausalLM"
    unknown = tmp_path / "llama" / "config.json"
    unknown.write_text(unknown.read_text().replace("LlamaForCausalLM", "MambaForCausalLM"))
    with pytest.raises(UnsupportedModelError, match=f"MambaForCausalLM is not supported.*Phi3For.*{message}"):
        load_model(str(tmp_path / "llama"))
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "Phi3ForCausalLM" in shown
    assert f"Not loaded: entry point '{module}'" in shown


def test_code_of_other_packages_does_not_run_for_a_built_in_architecture(install, tmp_path):
    install("raises", "raise SystemExit('loaded')")
    make_model("qwen3", tmp_path)
    load_model(str(tmp_path))


def test_each_module_defines_an_architecture():
    names = [architecture.huggingface.name for architecture in all_architectures().usable]
    folder = Path(sys.modules["treadle.models.architectures"].__file__).parent
    assert len(names) == len(set(names)) == len(list(folder.glob("*.py"))) - 1


def test_spec_errors_in_a_package_name_the_file(install, tmp_path):
    install(
        "needs",
        """
        from treadle.models import Architecture, CheckpointFormat
        ARCHITECTURE = Architecture(
            huggingface=CheckpointFormat(name="Phi3ForCausalLM", spec=lambda config: config["warp_and_weft"])
        )
        """,
    )
    make_phi3(tmp_path)
    with pytest.raises(ModelLoadError, match=r"config.json lacks 'warp_and_weft'"):
        load_model(str(tmp_path))
