"""What programs find in their folders: small synthetic data, by the name of the program or the data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pyarrow
from pyarrow import parquet

from tests.programs import data


def mnist(folder: str = "data") -> Callable[[Path], None]:
    return lambda home: data.idx(home / folder, "MNIST")


def nanogpt(home: Path) -> None:
    for split in ("train", "val"):
        data.tokens(home / "data" / "openwebtext" / f"{split}.bin", 200_000, 50_257)


def nanochat(home: Path) -> None:
    folder = home / "nanochat-base" / "base_data_climbmix"
    folder.mkdir(parents=True)
    texts = pyarrow.table({"text": [data.words(600)] * 2048})
    for shard in range(2):
        parquet.write_table(texts, folder / f"shard_{shard:05d}.parquet", row_group_size=128)


def char_gpt(home: Path) -> None:
    data.write(home / "input.txt", data.words(20_000))


def fineweb(folder: str, magic: int = 20240520, version: int = 1, count: int = 1_000_000) -> Callable[[Path], None]:
    def make(home: Path) -> None:
        head = numpy.zeros(256, dtype=numpy.int32)
        head[:3] = magic, version, count
        body = numpy.random.default_rng(0).integers(0, 50_257, count).astype(numpy.uint16)
        for split in ("train_000001", "val_000000"):
            file = home / folder / f"fineweb_{split}.bin"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(head.tobytes() + body.tobytes())

    return make


def modded_nanogpt(home: Path) -> None:
    fineweb("data/fineweb10B", count=3_000_000)(home)
    (home / "logs").mkdir()  # the program's own log has a folder in it


def pets(home: Path) -> None:
    data.images(home / "pictures")
    for label in (0, 1):
        for number in range(16):
            (home / "pictures" / f"class{label}" / f"{number}.png").rename(
                home / "pictures" / f"class{label}_{number}.jpg"
            )
        (home / "pictures" / f"class{label}").rmdir()


def shards(home: Path) -> None:
    folder = home / "edu_fineweb10B"
    folder.mkdir()
    for split in ("train", "val"):
        numpy.save(
            folder / f"{split}_000000.npy",
            numpy.random.default_rng(0).integers(0, 50_257, 1_500_000).astype(numpy.uint16),
        )


def bsds(home: Path) -> None:
    for split in ("train", "test"):
        folder = home / "dataset" / "BSDS300" / "images" / split
        data.images(folder, classes=1, each=16, size=300)
        for file in (folder / "class0").iterdir():
            file.rename(folder / file.name)


def carvana(home: Path) -> None:
    from PIL import Image

    data.images(home / "made", classes=1, each=20, size=256)
    for number in range(20):
        (home / "made" / "class0" / f"{number}.png").rename(home / "data" / "imgs" / f"{number}.png")
        Image.new("L", (256, 256), 0 if number % 2 else 1).save(home / "data" / "masks" / f"{number}_mask.png")


def languages(home: Path) -> None:
    for split in ("train", "valid", "test"):
        data.write(home / "data" / "wikitext-2" / f"{split}.txt", data.words(20_000))


def series(home: Path) -> None:
    numbers = numpy.random.default_rng(0).standard_normal((20_000, 7)).round(3)
    hours = numpy.datetime_as_string(
        numpy.datetime64("2016-07-01T00:00:00") + numpy.arange(20_000).astype("timedelta64[h]")
    )
    rows = (
        f"{str(hour).replace('T', ' ')},{','.join(map(str, row))}" for hour, row in zip(hours, numbers, strict=True)
    )
    data.write(home / "dataset" / "ETTh1.csv", "date,HUFL,HULL,MUFL,MULL,LUFL,LULL,OT\n" + "\n".join(rows) + "\n")


def blender(home: Path) -> None:
    from PIL import Image

    scene = home / "data" / "nerf_synthetic" / "lego"
    for split in ("train", "val", "test"):
        (scene / split).mkdir(parents=True)
        frames = []
        for number in range(3):
            pixels = numpy.random.default_rng(number).integers(0, 256, (200, 200, 4), dtype=numpy.uint8)
            Image.fromarray(pixels).save(scene / split / f"r_{number}.png")
            frames.append({"file_path": f"./{split}/r_{number}", "transform_matrix": numpy.eye(4).tolist()})
        data.write_json(scene / f"transforms_{split}.json", {"camera_angle_x": 0.69, "frames": frames})


def boxes(home: Path) -> None:
    data.images(home / "images", classes=1, each=16, size=320)
    for number in range(16):
        boxes = "".join(f"{label} 0.5 0.5 0.{2 + label} 0.{3 + label}\n" for label in range(3))
        data.write(home / "labels" / "class0" / f"{number}.txt", boxes)
    data.write(home / "boxes.yaml", "path: .\ntrain: images\nval: images\nnames:\n  0: a\n  1: b\n  2: c\n")
