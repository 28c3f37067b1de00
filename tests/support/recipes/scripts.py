"""The recipes: arguments, data, and changes for a machine without a GPU."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.recipes.job import Recipe


def tokens(folder: Path) -> None:
    """A text of random tokens, as nanoGPT reads it."""
    place = folder / "data" / "tiny"
    place.mkdir(parents=True)
    draw = np.random.default_rng(5)
    for name in ("train", "val"):
        draw.integers(0, 97, 4000).astype(np.uint16).tofile(place / f"{name}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 97}))


NANOGPT = Recipe(
    "nanoGPT",
    "train.py",
    (
        "--dataset=tiny",
        "--device=cpu",
        "--backend=gloo",
        "--compile=False",
        "--dtype=float32",
        "--gradient_accumulation_steps=4",
        "--batch_size=3",
        "--block_size=16",
        "--n_layer=2",
        "--n_head=2",
        "--n_embd=16",
        "--dropout=0.2",
        "--max_iters=14",
        "--eval_interval=4",
        "--eval_iters=2",
        "--warmup_iters=5",
        "--lr_decay_iters=14",
    ),
    metrics=r"(iter \d+: loss [\d.]+|step \d+: train loss .*)",
    files=("model.py", "configurator.py"),
    machine="""\
--- nanoGPT/train.py
-    device = f'cuda:{ddp_local_rank}'
-    torch.cuda.set_device(device)
@@
-    model = DDP(model, device_ids=[ddp_local_rank])
+    model = DDP(model)
""",
    data=tokens,
)



def pictures(folder: Path, train: int = 40, validate: int = 8, val: str = "val") -> None:
    """Random images of two classes."""
    draw = np.random.default_rng(5)
    for split, count in (("train", train), (val, validate)):
        for number in range(count):
            place = folder / "pictures" / split / f"class{number % 2}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")


TIMM = Recipe(
    "pytorch-image-models",
    "train.py",
    (
        *("--data-dir", "pictures", "--val-split", "val", "--num-classes", "2"),
        *("--model", "test_resnet", "--img-size", "32", "-b", "4", "--workers", "1"),
        *("--device", "cpu", "--drop", "0.3", "--drop-path", "0.2", "--mixup", "0.4"),
        *("--reprob", "0.5", "--aa", "rand-m3", "--model-ema", "--model-ema-decay", "0.9"),
        *("--model-ema-warmup", "--opt", "adamw", "--lr", "0.01", "--epochs", "3"),
        *("--sched-on-updates", "--warmup-epochs", "1", "--log-interval", "1"),
        *("--grad-accum-steps", "2", "--output", "out", "--experiment", "it"),
    ),
    metrics=r"(Train: \d+ \[.*?\) |Test.*\[|Loss: .*?\) |LR: \S+|Acc@\d: .*?\)|\*\*\* .*)",
    machine="""\
--- pytorch-image-models/train.py
-        task.prepare_distributed(device_ids=[device], broadcast_buffers=not args.no_ddp_bb)
+        task.prepare_distributed(device_ids=None, broadcast_buffers=not args.no_ddp_bb)
""",
    undisturbed="""\
--- pytorch-image-models/train.py
         use_prefetcher=args.prefetcher,
+        persistent_workers=False,
""",
    data=pictures,
    needs=("torchvision", "yaml", "PIL"),
    averages=("ModelEmaV3",),
    kill_after=4,
)

RECIPES = {recipe.repository: recipe for recipe in (NANOGPT, TIMM)}

__all__ = ["RECIPES"]
