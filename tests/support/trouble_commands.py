"""Cases of test_troubleshooting.py: command lines of ``pipeedge run``."""

from __future__ import annotations

from trouble import Cases, start

CASES = Cases()
says = CASES.says


RUNTIME = {
    "rank 5 is outside the world: with WORLD 2, RANK is 0 to 1": "5 2 -m vit-digits",
    "RANK and WORLD are missing: give RANK WORLD, e.g. '0 2' for the first of two, or use torchrun": "",
    "a world of 1,000,000 ranks: WORLD is at most 1024": "0 1000000",
    "--addr 10.255.0.77 is not an address of this machine, where rank 0 must listen; its addresses: …": (
        "0 2 -m vit-digits --addr 10.255.0.77"
    ),
    "--addr nowhere.invalid: cannot resolve this name": (
        "1 2 -m vit-digits --addr nowhere.invalid --timeout 1"
    ),
    "--key none.pem: no such file: make it with pipeedge key, and copy it to every machine": (
        "0 1 -m vit-digits --key none.pem"
    ),
    "--key open.pem: other users may read it (mode 644): run chmod 600 on it, …": (
        "0 1 -m vit-digits --key open.pem"
    ),
    "--key cut.pem: is cut off within a PEM block; copy it again": "0 1 -m vit-digits --key cut.pem",
    "--key half.pem: holds no certificate, or lacks its end; copy it again": (
        "0 1 -m vit-digits --key half.pem"
    ),
    "--key mixed.pem: the private key does not belong to the certificate": (
        "0 1 -m vit-digits --key mixed.pem"
    ),
    "-c p2p with a key: gloo cannot encrypt its links; leave out -c, for links over tcp, or the key": (
        "0 2 -m vit-digits -c p2p --key open.pem"
    ),
    "give either --key (PIPEEDGE_KEY) or --tls-cert, --tls-key and --tls-ca": (
        "0 2 -m vit-digits --key open.pem --tls-cert open.pem --tls-key open.pem --tls-ca open.pem"
    ),
    "-s/--socket-ifname eth77: the interface does not exist": "0 1 -m vit-digits -s eth77",
    "-q changes nothing: with one stage, on the data rank, nothing crosses a link": (
        "0 1 -m vit-digits -q 8 --dry-run"
    ),
    "--adaptive auto changes nothing: with one stage there is no link to adapt": (
        "0 1 -m vit-digits --adaptive auto --dry-run"
    ),
    "no weights at ViT-B_16-224.npz; pipeedge fetch fetches those of the known models": "0 1",
    "vit-base is neither a known model nor a directory, and …": "0 1 -m vit-base",
    "… has no config.json: a model directory holds config.json and model.safetensors": "0 1 -m ./empty",
    "model_type 't5' is not supported; supported are …": "0 1 -m ./t5",
    "… generates text: give --prompt TEXT, or --input with a file of prompts": "0 1 -m llama-puzzles",
    "no vocabulary for ./llama, so token ids cannot become text: put its tokenizer.json into llama": (
        "0 1 -m ./llama"
    ),
    "https://example.org/a.png is a URL, and nothing is fetched: download it, and give the file": (
        "0 1 -m vit-digits --input https://example.org/a.png"
    ),
    "nothing: no such file or folder": "0 1 -m vit-digits --input nothing",
    "empty: no image below this folder (known: …": "0 1 -m vit-digits --input empty",
    "photos/a.png: cannot be read as an image": "0 1 -m vit-digits --input photos",
    "photos holds images, s.txt text: give images and folders, or text files, or .npz files, not a mixture": (
        "0 1 -m vit-digits --input photos s.txt"
    ),
    "…: no file matches this pattern": "0 1 -m vit-digits --input *.jpeg",
    "t.npz: no array …": "0 1 -m vit-digits --input t.npz",
    "… not floating point: values must be normalised as in training": (
        "0 1 -m vit-digits --input integers.npz"
    ),
    "--dataset-root nowhere: no such folder": (
        "0 1 -m vit-digits --dataset-name ImageNet --dataset-root nowhere"
    ),
    "give either --input or --dataset-name, not both": (
        "0 1 -m vit-digits --dataset-name CoLA --input photos"
    ),
    "layers 9 to 16 are covered by no stage: the model's layers are 1 to 16": (
        "0 2 -m vit-digits -pt 1,8 --dry-run"
    ),
    "layer 25 is covered by no stage: stage ranges must follow one another, 26-48 begins too late": (
        "0 2 -pt 1,24,26,48 --dry-run"
    ),
    "the range 24-48 overlaps what comes before it: layer 25 should come next": (
        "0 2 -pt 1,24,24,48 --dry-run"
    ),
    "the range 1-24 goes beyond the model: its layers are 1 to 16": "0 2 -m vit-digits -pt 1,24 --dry-run",
    "a partition is pairs of first and last layer; 3 numbers were given": "0 2 -pt 1,24,25 --dry-run",
    "4 stages need as many ranks, the world has 2": ("0 2 -m vit-digits -pt 1,4,5,8,9,12,13,16 --dry-run"),
    "2 bit widths (-q) for 3 stages; give one for each, 0 for none": (
        "0 3 -m vit-digits -pt 1,4,5,8,9,16 -q 8,8 --dry-run"
    ),
    "automatic scheduling needs all three of -sm/--sched-models-file, -sdt/--sched-dev-types-file and "
    "-sd/--sched-dev-file": "0 2 -sm models.yml --dry-run",
    "-H/--hosts names 2 hosts for a world of 3 ranks": (
        "0 3 -m vit-digits -H a,b -sm models.yml -sdt device_types.yml -sd devices.yml"
    ),
    "s.yml: the host mb-0 is no rank; name the host of each rank with -H, or call the hosts by their ranks": (
        "0 2 -m vit-digits --schedule-file s.yml --dry-run"
    ),
    "s.yml: the host mb-7 has no rank; the hosts that have one are mb-0, mb-1": (
        "0 2 -m vit-digits --schedule-file s.yml -H mb-0,mb-1 --dry-run"
    ),
    "models.yml: no model vit-digits; the file has: …": (
        "0 1 -m vit-digits -H mb-0 -sm models.yml -sdt device_types.yml -sd devices.yml --dry-run"
    ),
    "--output a.txt: unknown suffix '.txt'; use .csv, …": "0 1 -m vit-digits --output a.txt",
    "… gives vectors, not classes; such results are written to .jsonl, .npz and .parquet only": (
        "0 1 -m bert-base-uncased --output a.csv"
    ),
    "--output out/a.csv: the directory out does not exist; create it first": (
        "0 1 -m vit-digits --output out/a.csv"
    ),
    "--report a.txt: a report is FILE.json, for programs, or FILE.html, for people": (
        "0 1 -m vit-digits --report a.txt"
    ),
    "--resume needs --output FILE, which an earlier run was to write": "0 1 -m vit-digits --resume",
    "--resume cannot be combined with --check, whose items may be written already": (
        "0 1 -m vit-digits --resume --output r.csv --check 3"
    ),
    "--output t.npz: would replace what --input reads; name another file": (
        "0 1 -m vit-digits --input t.npz --output t.npz"
    ),
    "…: would replace config.json, which …": "0 1 -m ./model --report model/config.json",
    "--trace x.json: is the same file as --report x.json; name another one": (
        "0 1 -m vit-digits --report x.json --trace x.json"
    ),
    "--metrics-dir metrics: shard-rank0.csv exists already; choose another directory, or --csv-file-mode "
    "w to replace it or a to append to it": "0 1 -m vit-digits --metrics-dir metrics",
}
"""Command lines of ``pipeedge run``."""


for _quote, _line in RUNTIME.items():
    says(_quote)(lambda patch, line=_line: start(line))
