"""The recipes: arguments, data, and changes for a machine without a GPU."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np

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
        *("--dataset=tiny", "--device=cpu", "--backend=gloo", "--compile=False"),
        *("--dtype=float32", "--gradient_accumulation_steps=4", "--batch_size=3"),
        *("--block_size=16", "--n_layer=2", "--n_head=2", "--n_embd=16", "--dropout=0.2"),
        *("--max_iters=14", "--eval_interval=4", "--eval_iters=2", "--warmup_iters=5"),
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
    kills=(6,),
)


def pictures(folder: Path, train: int = 40, validate: int = 8, val: str = "val") -> None:
    """Random images of five classes."""
    from PIL import Image

    draw = np.random.default_rng(5)
    for split, count in (("train", train), (val, validate)):
        for number in range(count):
            place = folder / "pictures" / split / f"class{number % 5}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (40, 40, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")


TIMM = Recipe(
    "pytorch-image-models",
    "train.py",
    (
        *("--data-dir", "pictures", "--val-split", "val", "--num-classes", "5"),
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
    imports=True,
    needs=("torchvision", "yaml", "PIL"),
    averages=("ModelEmaV3",),
    kills=(4, 6),
)


def few_pictures(folder: Path) -> None:
    pictures(folder, train=24)


IMAGENET = Recipe(
    "examples",
    "imagenet/main.py",
    (
        *("pictures", "-a", "mobilenet_v3_small", "-b", "3", "-j", "1", "--epochs", "3"),
        *("--lr", "0.01", "-p", "1", "--no-accel", "--dist-url", "env://"),
        *("--dist-backend", "gloo"),
    ),
    metrics=r"(Epoch: \S+\s|Test: \S+\s|Loss \S+ \(\S+\)|Acc@\d +\S+( \( *\S+\))?)",
    machine="""\
--- examples/imagenet/main.py
         print('using CPU, this will be slow')
+        model = torch.nn.parallel.DistributedDataParallel(model)
""",
    data=few_pictures,
    needs=("torchvision", "PIL"),
)

VISION = Recipe(
    "vision",
    "references/classification/train.py",
    (
        *("--data-path", "pictures", "--model", "mobilenet_v3_small", "--device", "cpu"),
        *("-b", "3", "-j", "1", "--epochs", "3", "--lr", "0.01", "--print-freq", "1"),
        *("--model-ema", "--model-ema-steps", "3", "--model-ema-decay", "0.9"),
        *("--lr-scheduler", "cosineannealinglr", "--lr-warmup-epochs", "1"),
        *("--mixup-alpha", "0.3", "--random-erase", "0.5", "--auto-augment", "ta_wide"),
        *("--train-crop-size", "40", "--val-crop-size", "40", "--val-resize-size", "40"),
        *("--output-dir", "out"),
    ),
    metrics=r"(Epoch: \[\d+\] +\[ *\d+/\d+\]|lr: \S+|(loss|acc\d): \S+ \(\S+\)|Acc@\d \S+)",
    files=("references/classification",),
    machine="""\
--- vision/references/classification/train.py
-        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
+        model = torch.nn.parallel.DistributedDataParallel(model)
--- vision/references/classification/utils.py
-    torch.cuda.set_device(args.gpu)
-    args.dist_backend = "nccl"
+    args.dist_backend = "gloo"
@@
-    t = torch.tensor(val, device="cuda")
+    t = torch.tensor(val)
""",
    data=few_pictures,
    needs=("torchvision", "PIL"),
    averages=("ExponentialMovingAverage",),
)


def digits(folder: Path) -> None:
    """Random digits in the files of MNIST."""
    draw, place = np.random.default_rng(5), folder / "data" / "MNIST" / "raw"
    place.mkdir(parents=True)
    for name, count in (("train", 60), ("t10k", 20)):
        images = draw.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = draw.integers(0, 10, count).astype(np.uint8)
        header = struct.pack(">IIII", 0x803, count, 28, 28)
        (place / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, count)
        (place / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


HOROVOD = Recipe(
    "horovod",
    "examples/pytorch/pytorch_mnist.py",
    ("--batch-size", "6", "--epochs", "3", "--no-cuda", "--log-interval", "1"),
    metrics=r"(Train Epoch.*|Test set.*)",
    data=digits,
    needs=("torchvision", "filelock"),
    horovod=True,
    setup_steps=1,  # hvd.broadcast_optimizer_state makes one, with gradients of zero
    kills=(8, 11),
)


HOROVOD_ELASTIC = Recipe(
    "horovod",
    "examples/elastic/pytorch/pytorch_mnist_elastic.py",
    (
        *("--batch-size", "6", "--epochs", "3", "--no-cuda", "--log-interval", "1"),
        *("--data-dir", "data"),
    ),
    metrics=r"(Train Epoch.*|Test set.*)",
    data=digits,
    needs=("torchvision", "filelock"),
    horovod=True,
    own_state=True,
    kills=(7, 10),
)


def pairs(folder: Path) -> None:
    """Random images in two sizes, in the folders of DIV2K."""
    from PIL import Image

    draw, place = np.random.default_rng(5), folder / "dataset" / "DIV2K"
    for name, size in (("DIV2K_train_HR/{}", 40), ("DIV2K_train_LR_bicubic/X2/{}x2", 20)):
        for number in range(6):
            path = place / f"{name.format(f'{number + 1:04}')}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (size, size, 3)).astype(np.uint8)).save(path)


EDSR = Recipe(
    "EDSR-PyTorch",
    "src/main.py",
    (
        *("--cpu", "--dir_data", "dataset", "--data_range", "1-4/5-6", "--ext", "img"),
        *("--scale", "2", "--patch_size", "16", "--batch_size", "2", "--test_every", "4"),
        *("--n_threads", "1", "--n_resblocks", "1", "--n_feats", "4", "--epochs", "3"),
        *("--print_every", "1", "--decay", "1", "--save", "it"),
    ),
    metrics=r"(\[\d+/\d+\]\t\[.*?\]|PSNR: .*)",
    files=("src",),
    data=pairs,
    kills=(6, 4),
    needs=("imageio", "skimage", "matplotlib", "tqdm", "PIL"),
    ranks=1,
)

RECIPES = {
    recipe.repository: recipe for recipe in (NANOGPT, TIMM, IMAGENET, VISION, HOROVOD, EDSR)
} | {"horovod elastic": HOROVOD_ELASTIC}

__all__ = ["RECIPES"]
