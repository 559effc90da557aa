"""Weight formats that the engine does not read, and the remedy for each."""

from __future__ import annotations

import shlex
from pathlib import Path

from mpillm.files import LFS_POINTER, lfs_hint

_TRANSFORMERS = (
    "save it as safetensors: `python3 -c 'import sys, transformers as t;"
    ' t.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto").save_pretrained(sys.argv[1])\''
    " {folder}`"
)
_SAFETENSORS = "fetch the model's model*.safetensors, and model.safetensors.index.json if there are several"
# Patterns of file names in the order of the search, each with its remedy, which contains {file} or {folder}
_OTHERS = (
    ("*.gguf", "convert it: `python -m mpillm fetch-model {file}`"),
    (
        "consolidated*.safetensors",
        f"Mistral's own form, with other names of tensors; {_SAFETENSORS}. If it has none, convert it with"
        " src/transformers/models/mistral/convert_mistral_weights_to_hf.py of transformers' repository",
    ),
    ("adapter_model.*", "it is an adapter; name its base model, or merge both by peft's merge_and_unload"),
    ("pytorch_model*.bin", _TRANSFORMERS),
    ("consolidated*.pth", _SAFETENSORS),
    ("tf_model.h5", _SAFETENSORS),
    ("flax_model.msgpack", _SAFETENSORS),
    ("*.onnx", _SAFETENSORS),
    ("model-*-of-*.safetensors", _SAFETENSORS),
    ("*.safetensors", "rename it: `mv {file} {folder}/model.safetensors`"),
)


def other_weights(folder: Path) -> str:
    """Return the end of a message: other weights in a folder, and the remedy; empty if there are none."""
    for pattern, remedy in _OTHERS:
        if files := sorted(folder.glob(pattern)):
            if pattern == "*.safetensors" and len(files) > 1:
                remedy = _SAFETENSORS
            names = {"file": shlex.quote(str(files[0])), "folder": shlex.quote(str(folder))}
            more = f" and {len(files) - 1} more" if len(files) > 1 else ""
            text = remedy.format(**names)
            if text != remedy and any(map(_is_pointer, files)):  # a command needs the file itself
                text = lfs_hint(folder)
            return f"; the folder has {files[0].name[:80]}{more}: {text}"
    return ""


def _is_pointer(file: Path) -> bool:
    """Return whether Git LFS has a pointer in place of a file."""
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            return stream.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:  # the remedy reports it
        return False
