"""Programs that use TensorFlow: by paths under `dayfly exec`, where each prints the same as for a folder, and by numbers.

docs/PYTHON.md has a row for each of the first ones, and the code of the last one.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from dayfly.sessions import _program
from PIL import Image

PAGE = Path(__file__).parents[3] / "docs" / "PYTHON.md"

PROGRAMS = {
    "TensorFlow: `list_files`, `read_file`": """
import sys, tensorflow as tf
paths = tf.data.Dataset.list_files(sys.argv[1] + "/photos/*/*.png", shuffle=False)
photos = paths.map(lambda path: tf.io.decode_png(tf.io.read_file(path)), num_parallel_calls=4)
print([int(tf.reduce_sum(tf.cast(pixels, tf.int64))) for pixels in photos])
print(sorted(tf.io.gfile.listdir(sys.argv[1] + "/photos")), tf.io.gfile.stat(sys.argv[1] + "/photos/cat/0.png").length)
""",
    "TensorFlow: `TFRecordDataset`, also compressed": """
import sys, tensorflow as tf
for compression in ("", "GZIP"):
    files = [f"{sys.argv[1]}/records/{number}{compression}.tfrecord" for number in range(2)]
    records = tf.data.TFRecordDataset(files, compression_type=compression, num_parallel_reads=2)
    features = {"number": tf.io.FixedLenFeature([], tf.int64)}
    print(sorted(int(tf.io.parse_single_example(record, features)["number"]) for record in records))
""",
    "Keras: `image_dataset_from_directory`": """
import sys, tensorflow as tf
photos = tf.keras.utils.image_dataset_from_directory(sys.argv[1] + "/photos", image_size=(10, 10), batch_size=4, shuffle=False)
print(photos.class_names, [(float(tf.reduce_sum(pixels)), labels.numpy().tolist()) for pixels, labels in photos])
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(1)])
model.compile(loss="mse")
print(len(model.fit(photos, epochs=2, verbose=0).history["loss"]))
""",
}


@pytest.fixture(scope="module")
def folder(session, tmp_path_factory):
    """A folder with files that these libraries have written, staged in as /dayfly/tensorflow."""
    root = tmp_path_factory.mktemp("tensorflow")
    numbers = np.random.default_rng(3)
    for kind in ("cat", "dog"):
        (root / "photos" / kind).mkdir(parents=True)
        for number in range(16):
            Image.fromarray(numbers.integers(0, 256, (20, 30, 3), np.uint8)).save(root / f"photos/{kind}/{number}.png")
    (root / "records").mkdir()
    for compression in ("", "GZIP"):
        for shard in range(2):
            with tf.io.TFRecordWriter(str(root / f"records/{shard}{compression}.tfrecord"), compression) as writer:
                for number in range(500):
                    value = tf.train.Feature(int64_list=tf.train.Int64List(value=[2 * number + shard]))
                    features = tf.train.Features(feature={"number": value})
                    writer.write(tf.train.Example(features=features).SerializeToString())
    session.stage_in(root, "/dayfly/tensorflow")
    return str(root)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_for_the_namespace(session, folder, tmp_path, name):
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    expected = subprocess.check_output([sys.executable, program, folder], text=True)
    line = [_program(), "exec", "--", sys.executable, program, "/dayfly/tensorflow"]
    assert subprocess.check_output(line, text=True) == expected != ""


def test_the_page_names_these_programs():
    rows = re.findall(r"^\| (.*?) \| works, with TensorFlow 2\.21 \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(PROGRAMS)


def test_the_code_on_the_page_reads_each_sample_once_an_epoch(session, folder, content):
    (code,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    seen = []
    found = {"step": lambda data, targets: seen.append((data.numpy().tolist(), targets.numpy().tolist()))}
    exec("import dayfly\nimport numpy as np\n" + code, found)
    expected = sorted(data for path, data in content.items() if path.startswith("train/"))
    for epoch in (seen[: len(seen) // 2], seen[len(seen) // 2 :]):
        assert sorted(item for data, _ in epoch for item in data) == expected
    samples = found["samples"]
    target_of = dict(samples.__getitems__(range(len(samples))))
    assert all(target_of[item] == target for data, targets in seen for item, target in zip(data, targets))
    assert seen[0] != seen[len(seen) // 2], "each epoch has an order of its own"
