"""`treadle models`: list the available models and the supported formats."""

import argparse


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "models",
        help="list the available models",
        description="List the embedded models, those in the local Hugging Face cache, and the supported formats.",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from treadle.models.architectures import all_architectures, gguf_names, huggingface_names
    from treadle.models.loaders.gguf import SUPPORTED_TYPES
    from treadle.models.registry import EMBEDDED_MODELS
    from treadle.models.spec import SUPPORTED_ROPE_TYPES

    print("Embedded:")
    for model in EMBEDDED_MODELS.values():
        path = model.path()
        if path is None:
            print(f"  {model.name}  not installed: {model.install}")
        else:
            print(f"  {model.name}  {path.stat().st_size / 2**20:.0f} MiB, {model.licence}\n    {path}")
    cached = _cached_hub_models()
    if cached:
        print("In the local Hugging Face cache:")
        for hub_id, num_bytes in cached:
            print(f"  {hub_id}  {num_bytes / 2**20:.0f} MiB")
    print("Others: --model takes a folder in Hugging Face layout, a .gguf file, or a hub id.")
    print(f"  Architectures: {', '.join(huggingface_names())}")
    print(f"  GGUF architectures: {', '.join(gguf_names())}")
    print(f"  GGUF types: {', '.join(SUPPORTED_TYPES)}")
    print(f"  Rope types: {', '.join(SUPPORTED_ROPE_TYPES)}")
    for reason in all_architectures().broken:
        print(f"  Not loaded: {reason}")
    return 0


def _cached_hub_models() -> list[tuple[str, int]]:
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo.repo_id, repo.size_on_disk) for repo in repos if repo.repo_type == "model")
