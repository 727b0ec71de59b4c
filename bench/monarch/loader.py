"""Reads TFRecord files by path, epoch by epoch, as a training would, with an unmodified TensorFlow or PyTorch.

Usage: loader.py make FOLDER FILES BYTES_PER_FILE
       loader.py tensorflow|pytorch FOLDER EPOCHS SECONDS_PER_BATCH
Prints the seconds that each epoch took. A model is a pause of fixed length for each batch."""
import os
import random
import struct
import sys
import time

RECORDS_PER_FILE, FILES_PER_BATCH = 10, 4


def make(folder, files, size):
    """Writes TFRecord files with random records."""
    import tensorflow as tf
    os.makedirs(folder)
    for number in range(files):
        with tf.io.TFRecordWriter(f"{folder}/train-{number:05}-of-{files:05}.tfrecord") as writer:
            for _ in range(RECORDS_PER_FILE):
                writer.write(os.urandom(size // RECORDS_PER_FILE - 16))


def tensorflow(folder, epoch):
    import tensorflow as tf
    files = sorted(f"{folder}/{name}" for name in os.listdir(folder))
    random.Random(epoch).shuffle(files)
    dataset = tf.data.Dataset.from_tensor_slices(files)
    dataset = dataset.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=8)
    return dataset.batch(FILES_PER_BATCH * RECORDS_PER_FILE).prefetch(4)


def pytorch(folder, epoch):
    import torch

    class Files(torch.utils.data.Dataset):
        def __init__(self):
            self.names = sorted(os.listdir(folder))

        def __len__(self):
            return len(self.names)

        def __getitem__(self, index):
            with open(f"{folder}/{self.names[index]}", "rb") as file:
                records, at, data = [], 0, file.read()
            while at < len(data):
                (length,) = struct.unpack_from("<Q", data, at)
                records.append(torch.frombuffer(bytearray(data[at + 12 : at + 12 + length]), dtype=torch.uint8))
                at += 16 + length
            return torch.stack(records)

    torch.manual_seed(epoch)
    return torch.utils.data.DataLoader(Files(), batch_size=FILES_PER_BATCH, shuffle=True, num_workers=4)


def main():
    kind, folder = sys.argv[1:3]
    if kind == "make":
        return make(folder, int(sys.argv[3]), int(sys.argv[4]))
    epochs, pause = int(sys.argv[3]), float(sys.argv[4])
    loader = {"tensorflow": tensorflow, "pytorch": pytorch}[kind]
    times = []
    for epoch in range(epochs):
        start, batches = time.monotonic(), 0
        for _ in loader(folder, epoch):
            batches += 1
            time.sleep(pause)
        times.append(time.monotonic() - start)
        files = len(os.listdir(folder))
        assert batches >= files // FILES_PER_BATCH, f"{batches} batches of {files} files"
    print(*(f"{seconds:.2f}" for seconds in times))


main()
