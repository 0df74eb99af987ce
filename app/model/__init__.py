"""Model files on disk: where they come from, what they mean, and their tokenizer and chat template.

::

    resolve.py         a reference (name, .gguf, folder) → ModelFolder, through the cache
    fetch.py           the default model's file, from its Python package
    folder.py          ModelFolder: a folder in Hugging Face layout, checked when opened
    config.py          ModelConfig: config.json, checked
    architectures.py   which decoders are supported, and in what they differ
    rope_scaling.py    the part of config.json about rotary embeddings
    fields.py          fields of config.json, each with its type
    limits.py          LengthLimits: prompt + answer at most
    safetensors.py     read and write *.safetensors, one tensor at a time
    gguf_file.py       read the metadata and the raw tensors of a .gguf file
    gguf_convert.py    .gguf → folder in Hugging Face layout
    gguf_tokenizer.py  the tokenizer inside a .gguf → tokenizer.json
    tokenizer.py       text ↔ token ids, and the bytes of one token
    chat.py            messages → prompt text

Nothing here imports Paddle: web uses it too.
"""
