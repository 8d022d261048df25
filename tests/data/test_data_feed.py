"""A feed goes through every sample once an epoch, in shards that do not overlap, and can be taken up again at any batch."""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.schema.data import Loader
from shoal.data import ShardFeed
from shoal.errors import ShoalError
from tests.support.numbered_samples import Numbers


def numbers(feed: ShardFeed, batches: int) -> list[list[int]]:
    return [batch["number"].tolist() for batch in islice(feed, batches)]


def epoch_of(feed: ShardFeed) -> list[int]:
    assert feed.batches_per_epoch is not None
    return [number for batch in numbers(feed, feed.batches_per_epoch) for number in batch]


def again(state: Any) -> Any:
    return json.loads(json.dumps(state))


@given(count=st.integers(1, 60), shards=st.integers(1, 6), batch=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_shards_partition_every_epoch(count: int, shards: int, batch: int, seed: int) -> None:
    count = max(count, shards)
    feeds = [ShardFeed(Numbers(count), batch_size=batch, seed=seed, shard=(i, shards), drop_last=False) for i in range(shards)]
    for _ in range(2):
        seen = [epoch_of(feed) for feed in feeds]
        assert sorted(number for shard in seen for number in shard) == list(range(count))


@given(count=st.integers(4, 40), shards=st.integers(1, 4), seed=st.integers(0, 99))
def test_shard_i_takes_every_count_th_of_one_order(count: int, shards: int, seed: int) -> None:
    whole = epoch_of(ShardFeed(Numbers(count), batch_size=1, seed=seed))
    for index in range(shards):
        assert epoch_of(ShardFeed(Numbers(count), batch_size=1, seed=seed, shard=(index, shards))) == whole[index::shards]


@given(count=st.integers(5, 50), batch=st.integers(1, 5), drop=st.booleans(), reshuffle=st.booleans(), at=st.integers(0, 40))
def test_a_resumed_feed_goes_on_identically(count: int, batch: int, drop: bool, reshuffle: bool, at: int) -> None:
    def feed() -> ShardFeed:
        return ShardFeed(Numbers(count), batch_size=batch, seed=3, drop_last=drop, reshuffle=reshuffle)

    whole = numbers(feed(), at + 20)
    first = feed()
    numbers(first, at)
    second = feed()
    second.load_state_dict(again(first.state_dict()))
    assert (second.epoch, second.position) == (first.epoch, first.position)
    assert numbers(second, 20) == whole[at:]


def test_epochs_are_fresh_orders_by_seed() -> None:
    feed = ShardFeed(Numbers(50), batch_size=10, seed=1)
    first, second = epoch_of(feed), epoch_of(feed)
    assert first != second
    assert epoch_of(ShardFeed(Numbers(50), batch_size=10, seed=1)) == first
    assert epoch_of(ShardFeed(Numbers(50), batch_size=10, seed=2)) != first
    same = ShardFeed(Numbers(50), batch_size=10, seed=1, reshuffle=False)
    assert epoch_of(same) == epoch_of(same) == first


def test_epoch_and_position_count_batches_consumed() -> None:
    feed = ShardFeed(Numbers(25), batch_size=10, seed=1)
    assert (feed.batches_per_epoch, feed.epoch, feed.position, feed.at_epoch_end) == (2, 0, 0, False)
    numbers(feed, 2)
    assert (feed.epoch, feed.position, feed.at_epoch_end) == (0, 2, True)
    next(feed)
    assert (feed.epoch, feed.position, feed.at_epoch_end) == (1, 1, False)
    kept = ShardFeed(Numbers(25), batch_size=10, seed=1, drop_last=False)
    assert [len(batch) for batch in numbers(kept, 3)] == [10, 10, 5]


def test_too_few_samples_for_a_batch_are_refused() -> None:
    with pytest.raises(ShoalError, match="10 samples over 4 shards do not make one batch of 8"):
        ShardFeed(Numbers(10), batch_size=8, seed=0, shard=(0, 4))


def test_the_number_of_shards_may_change_at_a_whole_step() -> None:
    """4 shards × 2 and 2 shards × 4 use up the same samples in a step, so the rest of the epoch is the same."""
    four = [ShardFeed(Numbers(64), batch_size=2, seed=5, shard=(i, 4)) for i in range(4)]
    used = {number for feed in four for batch in numbers(feed, 3) for number in batch}
    two = [ShardFeed(Numbers(64), batch_size=4, seed=5, shard=(i, 2)) for i in range(2)]
    for feed in two:
        feed.load_state_dict(again(four[0].state_dict()))
        assert feed.position == 3
    rest = {number for feed in two for batch in numbers(feed, 5) for number in batch}
    assert used | rest == set(range(64))
    assert not used & rest
    with pytest.raises(ShoalError, match="24 samples of the epoch are used up"):
        ShardFeed(Numbers(64), batch_size=5, seed=5, shard=(0, 2)).load_state_dict(four[0].state_dict())


@pytest.mark.whole
@pytest.mark.parametrize("persistent", [True, False])
def test_processes_that_load_ahead_give_the_same_batches(persistent: bool) -> None:
    loader = Loader(num_workers=2, persistent_workers=persistent, prefetch_factor=3)
    whole = numbers(ShardFeed(Numbers(23), batch_size=4, seed=7), 18)
    feed = ShardFeed(Numbers(23), batch_size=4, seed=7, loader=loader)
    assert numbers(feed, 7) == whole[:7]
    state = again(feed.state_dict())
    assert (state["epoch"], state["position"]) == (1, 2), "what is loaded ahead does not count"
    feed.close()
    assert numbers(feed, 2) == whole[7:9], "a closed feed goes on where it was"
    feed.close()
    resumed = ShardFeed(Numbers(23), batch_size=4, seed=7, loader=loader)
    resumed.load_state_dict(state)
    assert numbers(resumed, 11) == whole[7:18]
    resumed.close()
    in_process = ShardFeed(Numbers(23), batch_size=4, seed=7)
    in_process.load_state_dict(state)
    assert numbers(in_process, 11) == whole[7:18], "with or without processes, a position is a position"


@pytest.mark.whole
def test_images_in_one_tensor_reach_the_processes() -> None:
    from shoal.data.images.samples import TensorImages

    images = TensorImages(torch.rand(9, 1, 2, 2), torch.arange(9))
    feed = ShardFeed(images, batch_size=3, seed=1, loader=Loader(num_workers=1))
    plain = ShardFeed(images, batch_size=3, seed=1)
    for batch, expected in islice(zip(feed, plain, strict=True), 4):
        assert torch.equal(batch["image"], expected["image"])
        assert torch.equal(batch["label"], expected["label"])
    feed.close()


def test_loading_ahead_leaves_the_random_numbers_of_the_model_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    feed = ShardFeed(Numbers(8), batch_size=4, seed=1, loader=Loader(num_workers=1))
    numbers(feed, 3)
    feed.close()
    assert torch.equal(torch.rand(3), expected)


def test_an_error_in_a_process_is_told_plainly() -> None:
    feed = ShardFeed(Numbers(8, broken=5), batch_size=4, seed=1, loader=Loader(num_workers=1))
    with pytest.raises(ShoalError, match=r"^sample 5 is broken$"):
        numbers(feed, 2)
    feed.close()


def test_more_processes_than_cores_are_no_warning() -> None:
    feed = ShardFeed(Numbers(8), batch_size=4, seed=1, loader=Loader(num_workers=5))
    assert len(numbers(feed, 2)) == 2
    feed.close()


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_any_seed_works(seed: int) -> None:
    assert sorted(epoch_of(ShardFeed(Numbers(6), batch_size=2, seed=seed))) == list(range(6))


@given(count=st.integers(2, 40), parts=st.integers(1, 5), batch=st.integers(1, 4), drop=st.booleans())
def test_parts_make_the_whole_batch_and_step_together(count: int, parts: int, batch: int, drop: bool) -> None:
    size = min(batch * parts, count)
    whole = ShardFeed(Numbers(count), batch_size=size, seed=3, drop_last=drop)
    cut = [ShardFeed(Numbers(count), batch_size=size, seed=3, part=(i, parts), drop_last=drop) for i in range(parts)]
    assert {feed.batches_per_epoch for feed in cut} == {whole.batches_per_epoch}
    for batch_of_all in numbers(whole, 2 * (whole.batches_per_epoch or 0)):
        assert [numbers(feed, 1)[0] for feed in cut] == [batch_of_all[i::parts] for i in range(parts)]
    assert {json.dumps(feed.state_dict()) for feed in cut} == {json.dumps(whole.state_dict())}


def test_parts_are_the_same_from_processes_that_load_ahead() -> None:
    plain = ShardFeed(Numbers(9), batch_size=4, seed=1, part=(1, 2), drop_last=False)
    ahead = ShardFeed(Numbers(9), batch_size=4, seed=1, part=(1, 2), drop_last=False, loader=Loader(num_workers=1))
    assert numbers(ahead, 4) == numbers(plain, 4)
    assert numbers(plain, 2)[-1] == [], "the last batch has one sample, and it is the other's"
    ahead.close()
