import random

import pytest

from spikeprof.kernels.cache.page_table import PageTable
from spikeprof.kernels.cache.protocol import CacheFull

SAME_HASH = 2**61 - 1  # Python's hash of an int is the int modulo this


def table(pages=8, page_size=4, max_sequences=4, max_tokens=20):
    return PageTable(pages=pages, page_size=page_size, max_sequences=max_sequences, max_tokens=max_tokens)


def test_a_plan_says_slot_page_and_length_of_each_sequence():
    pages = table()
    assert pages.begin(7, ()) == pages.begin(9, ()) == 0
    plan = pages.plan([(7, 5), (9, 2)])
    # Pages are taken from 0 on: 7 has 0 and 1, 9 has 2.
    assert plan.slots.tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert plan.block_table.tolist() == [[0, 1], [2, 0]]
    assert plan.lengths.tolist() == [5, 2]
    assert plan.copies == []
    plan = pages.plan([(9, 1), (7, 4)])  # in the plan's order, not that of the sequences' ages
    assert plan.slots.tolist() == [10, 5, 6, 7, 12]
    assert plan.block_table.tolist() == [[2, 0, 0], [0, 1, 3]]
    assert plan.lengths.tolist() == [3, 9]


def test_evicting_gives_pages_back_once():
    pages = table()
    pages.begin(1, ())
    pages.plan([(1, 9)])
    assert pages.free_pages_count == 5
    pages.evict(1)
    assert pages.free_pages_count == 8
    with pytest.raises(IndexError, match="sequence 1 is not there"):
        pages.evict(1)


def test_whole_pages_of_equal_prompts_are_shared_but_not_the_last_token():
    pages = table()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    pages.begin(1, prompt)
    pages.plan([(1, 8)])
    assert pages.begin(2, prompt) == 4  # the second page would leave no query to run
    assert pages.begin(3, [*prompt, 9]) == 8
    assert pages.begin(4, [1, 2, 3, 9, 5]) == 0
    assert pages.pages_of(2) == [0]
    assert pages.pages_of(3) == [0, 1]


def test_pages_that_are_not_full_are_not_shared():
    pages = table()
    pages.begin(1, [1, 2, 3, 4, 5, 6, 7, 8])
    pages.plan([(1, 6)])
    assert pages.begin(2, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 4
    pages.plan([(1, 2)])  # the rest of the prompt: now it is full
    assert pages.begin(3, [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_what_comes_after_the_prompt_is_not_shared():
    pages = table()
    pages.begin(1, [1, 2, 3, 4, 5])
    pages.plan([(1, 8)])
    assert pages.begin(2, [1, 2, 3, 4, 5, 0, 0, 0, 0]) == 4


def test_the_same_tokens_after_another_beginning_are_not_shared():
    pages = table()
    pages.begin(1, [1, 1, 1, 1, 5, 6, 7, 8])
    pages.begin(2, [2, 2, 2, 2, 0, 0, 0, 0])
    pages.plan([(1, 8), (2, 8)])
    assert pages.begin(3, [2, 2, 2, 2, 5, 6, 7, 8, 9]) == 4


def test_tokens_of_equal_hash_are_told_apart():
    prompt, other = (1, 2, 3, 4, 5), (1, 2, 3 + SAME_HASH, 4, 5)
    assert hash(prompt[:4]) == hash(other[:4])
    pages = table()
    pages.begin(1, prompt)
    pages.plan([(1, 5)])
    assert pages.begin(2, other) == 0
    pages.plan([(2, 5)])
    assert pages.begin(3, other) == 4
    assert pages.pages_of(3) == pages.pages_of(2)[:1]


def test_evicting_keeps_shared_pages_alive_and_forgets_the_others():
    pages = table()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pages.begin(1, prompt)
    pages.plan([(1, 9)])
    pages.begin(2, prompt[:5])
    pages.evict(1)
    assert pages.free_pages_count == 7
    assert pages.begin(3, prompt) == 4  # of sequence 2; the second page went with sequence 1
    pages.evict(2)
    pages.evict(3)
    assert pages.free_pages_count == 8
    assert pages.begin(4, prompt) == 0


def test_a_fork_copies_the_page_that_is_written_and_no_other():
    pages = table()
    pages.begin(1, ())
    pages.plan([(1, 6)])
    pages.fork(1, 2)
    assert pages.pages_of(2) == [0, 1]
    assert pages.free_pages_count == 6
    plan = pages.plan([(1, 1), (2, 1)])
    # The first writer takes the copy; the second is then alone on the page.
    assert plan.copies == [(1, 2)]
    assert plan.block_table.tolist() == [[0, 2], [0, 1]]
    assert plan.slots.tolist() == [10, 6]
    assert pages.plan([(1, 1), (2, 1)]).copies == []


def test_a_fork_at_the_end_of_a_page_copies_nothing():
    pages = table()
    pages.begin(1, ())
    pages.plan([(1, 4)])
    pages.fork(1, 2)
    plan = pages.plan([(1, 1), (2, 1)])
    assert plan.copies == []
    assert plan.block_table.tolist() == [[0, 1], [0, 2]]


def test_truncating_gives_pages_back_and_stops_sharing_what_is_rewritten():
    pages = table()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pages.begin(1, prompt)
    pages.plan([(1, 9)])
    pages.truncate(1, 6)
    assert pages.length(1) == 6
    assert pages.free_pages_count == 6
    assert pages.begin(2, prompt) == 8  # still whole: nothing was written over it
    pages.evict(2)
    pages.plan([(1, 2)])  # other tokens, for all that the table knows
    assert pages.begin(3, prompt) == 4


def test_a_shared_page_is_copied_before_it_is_rewritten():
    pages = table()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    pages.begin(1, prompt)
    pages.plan([(1, 9)])
    pages.begin(2, prompt)
    pages.truncate(1, 6)
    assert pages.plan([(1, 1)]).copies == [(1, 2)]
    assert pages.pages_of(2) == [0, 1]
    assert pages.begin(3, prompt) == 8


def test_a_full_table_says_what_is_missing_and_changes_nothing():
    pages = table(pages=3)
    pages.begin(1, ())
    pages.begin(2, ())
    pages.plan([(1, 6)])
    pages.fork(1, 3)
    text = "8 new tokens of 3 sequences need 3 pages of 4 tokens: 1 of 3 are free, 2 are missing"
    with pytest.raises(CacheFull, match=text):
        pages.plan([(2, 4), (1, 3), (3, 1)])  # one for 2, one more and a copy for 1
    assert (pages.length(1), pages.length(2), pages.free_pages_count) == (6, 0, 1)
    pages.plan([(2, 4)])
    with pytest.raises(CacheFull, match="0 of 3 are free, 1 are missing"):
        pages.plan([(3, 1)])
    pages.evict(1)
    assert pages.plan([(3, 1)]).copies == []


def test_more_sequences_than_can_be():
    pages = table(max_sequences=1)
    pages.begin(1, ())
    with pytest.raises(CacheFull, match="sequence 2 finds 1 others: max_sequences is as many"):
        pages.begin(2, ())


@pytest.mark.parametrize(
    ("new", "error", "text"),
    [
        ([], ValueError, "new is empty"),
        ([(1, 1), (1, 2)], ValueError, "names a sequence twice"),
        ([(1, 0)], ValueError, "new tokens of sequence 1 are 0: 1 at least"),
        ([(1, 21)], ValueError, r"sequence 1 would have 0 \+ 21 tokens, max_tokens is 20"),
        ([(5, 1)], IndexError, "sequence 5 is not there: begin it first"),
    ],
)
def test_plans_that_cannot_be(new, error, text):
    pages = table()
    pages.begin(1, ())
    with pytest.raises(error, match=text):
        pages.plan(new)


def test_other_arguments_that_cannot_be():
    pages = table()
    pages.begin(1, ())
    with pytest.raises(ValueError, match="sequence 1 is there already"):
        pages.begin(1, ())
    with pytest.raises(ValueError, match="tokens of sequence 2 are 21, max_tokens is 20"):
        pages.begin(2, range(21))
    with pytest.raises(ValueError, match="length is 1, sequence 1 has 0"):
        pages.truncate(1, 1)
    with pytest.raises(IndexError, match="sequence 3 is not there"):
        pages.fork(3, 4)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_keeps_every_sequence_what_it_is(seed):
    """Against a model that writes tokens into slots: pages mix nothing up, and none is lost or held twice."""
    chance = random.Random(seed)
    pages = table(pages=10, page_size=3, max_sequences=5, max_tokens=15)
    slots: dict[int, int] = {}
    expected: dict[int, list[int]] = {}
    pending: dict[int, list[int]] = {}  # what is left of each prompt
    for step in range(400):
        action = chance.choice(["begin", "plan", "plan", "plan", "fork", "truncate", "evict"])
        try:
            if action == "begin":
                prompt = [chance.choice([1, 1, 2, 1 + SAME_HASH]) for _ in range(chance.randint(0, 12))]
                known = pages.begin(step, prompt)
                assert known % 3 == 0
                assert known < max(len(prompt), 1)
                expected[step], pending[step] = prompt[:known], prompt[known:]
            elif action == "plan" and expected:
                chosen = chance.sample(sorted(expected), chance.randint(1, len(expected)))
                new = []
                for sequence in chosen:
                    count = chance.randint(1, 4)
                    if len(expected[sequence]) + count <= 15:
                        new.append((sequence, count))
                if not new:
                    continue
                plan = pages.plan(new)
                for source, target in plan.copies:
                    slots.update({target * 3 + at: slots.get(source * 3 + at, -1) for at in range(3)})
                tokens = []
                for sequence, count in new:
                    own = pending[sequence][:count]
                    pending[sequence] = pending[sequence][count:]
                    own += [chance.randint(10, 99) for _ in range(count - len(own))]
                    expected[sequence] += own
                    tokens += own
                assert len(set(plan.slots.tolist())) == len(tokens)
                slots.update(zip(plan.slots.tolist(), tokens, strict=True))
                for row, (sequence, _) in enumerate(new):
                    held = plan.block_table[row].tolist()
                    assert held[: len(pages.pages_of(sequence))] == pages.pages_of(sequence)
            elif action == "fork" and expected:
                parent = chance.choice(sorted(expected))
                pages.fork(parent, step)
                expected[step], pending[step] = list(expected[parent]), []
            elif action == "truncate" and expected:
                sequence = chance.choice(sorted(expected))
                length = chance.randint(0, len(expected[sequence]))
                pages.truncate(sequence, length)
                expected[sequence], pending[sequence] = expected[sequence][:length], []
            elif action == "evict" and expected:
                sequence = chance.choice(sorted(expected))
                pages.evict(sequence)
                del expected[sequence], pending[sequence]
        except CacheFull:
            if expected and chance.random() < 0.5:
                sequence = chance.choice(sorted(expected))
                pages.evict(sequence)
                del expected[sequence], pending[sequence]
        held = set()
        for sequence, tokens in expected.items():
            own = pages.pages_of(sequence)
            held.update(own)
            assert [slots[own[at // 3] * 3 + at % 3] for at in range(len(tokens))] == tokens
        assert pages.free_pages_count == 10 - len(held)
