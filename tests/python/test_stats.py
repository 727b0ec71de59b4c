"""What a loader says about where its time went."""

import logging
import time

import dayfly
import dayfly.torch
import pytest
from dayfly.torch.statistics import EpochStats
from helpers import first


def slow(data):
    time.sleep(0.002)
    return len(data)


@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_a_loader_sums_up_what_its_processes_measured(session, caplog, method):
    samples = dayfly.Samples("/dayfly/train", transform=slow)
    workers = {"num_workers": 2, "multiprocessing_context": method} if method else {}
    loader = dayfly.torch.loader(samples, batch_size=32, collate_fn=first, **workers)
    assert loader.stats() is None and loader.dataset.root == samples.root
    with caplog.at_level(logging.INFO, "dayfly"):
        for epoch in range(2):
            for number, _ in enumerate(loader):
                if number == 3:
                    assert (loader.stats().epoch, loader.stats().samples >= 96) == (epoch, True)
            stats = loader.stats()
            assert (stats.epoch, stats.samples) == (epoch, 601)
            assert stats.transform_s > 601 * 0.002 and 0 < stats.read_s and 0 < stats.waited_s <= stats.elapsed_s
            assert set(stats.bytes) == {"drive", "cached", "memory", "server"} and stats.bytes["drive"] > 0
            assert sum(stats.bytes.values()) == samples.sizes.sum()
    assert len(caplog.messages) == 2 and caplog.messages[1].startswith("epoch 1: 601 samples in ")


def test_an_abandoned_epoch_and_plain_folders_have_numbers_too(tmp_path):
    (tmp_path / "a").write_bytes(b"content")
    with pytest.warns(RuntimeWarning):
        loader = dayfly.torch.loader(dayfly.Samples(str(tmp_path)), collate_fn=first)
    next(iter(loader))
    assert loader.stats().samples == 1
    assert list(loader) == [[b"content"]] and loader.stats().bytes == dict.fromkeys(("drive", "cached", "memory", "server"), 0)


@pytest.mark.parametrize(
    ("waited", "read", "transform", "limit", "words"),
    [
        (0.4, 5, 50, "training", "storage is not the limit"),
        (6, 20, 5, "storage", "storage is the limit"),
        (6, 5, 20, "transform", "use more workers"),
        (6, 1, 2, "transport", "what workers send is the limit"),
    ],
)
def test_the_limit_is_what_the_loop_waited_for(waited, read, transform, limit, words):
    stats = EpochStats(3, 10, 10.0, waited, read, transform, {"drive": 3, "memory": 1})
    assert stats.limit == limit and words in str(stats) and "drive 75 %, memory 25 %" in str(stats)
