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
        ([(1, 0)], ValueError, "new tokens of sequence 1 are 0: a whole number, 1 at least"),
        ([(1, 1.5)], ValueError, "new tokens of sequence 1 are 1.5: a whole number, 1 at least"),
        ([(1, 21)], ValueError, r"sequence 1 would have 0 \+ 21 tokens, max_tokens is 20"),
        ([(5, 1)], IndexError, "sequence 5 is not there: begin it first"),
    ],
)
def test_plans_that_cannot_be(new, error, text):
    pages = table()
    pages.begin(1, ())
    with pytest.raises(error, match=text):
        pages.plan(new)
    assert (pages.length(1), pages.free_pages_count) == (0, pages.pages)


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


class Model:
    """Tokens written to slots, as a cache would, beside what each sequence must then consist of."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.table = table(pages=10, page_size=3, max_sequences=5, max_tokens=15)
        self.slots = {}
        self.expected = {}
        self.prompts_left = {}

    def any_sequence(self):
        return self.chance.choice(sorted(self.expected))

    def begin(self, step):
        prompt = [self.chance.choice([1, 1, 2, 1 + SAME_HASH]) for _ in range(self.chance.randint(0, 12))]
        known = self.table.begin(step, prompt)
        assert known % 3 == 0
        assert known < max(len(prompt), 1)
        self.expected[step], self.prompts_left[step] = prompt[:known], prompt[known:]

    def fork(self, step):
        parent = self.any_sequence()
        self.table.fork(parent, step)
        self.expected[step], self.prompts_left[step] = list(self.expected[parent]), []

    def truncate(self, _):
        sequence = self.any_sequence()
        length = self.chance.randint(0, len(self.expected[sequence]))
        self.table.truncate(sequence, length)
        self.expected[sequence], self.prompts_left[sequence] = self.expected[sequence][:length], []

    def evict(self, _):
        sequence = self.any_sequence()
        self.table.evict(sequence)
        del self.expected[sequence], self.prompts_left[sequence]

    def plan(self, _):
        picked = self.chance.sample(sorted(self.expected), self.chance.randint(1, len(self.expected)))
        new = [(sequence, self.chance.randint(1, 4)) for sequence in picked]
        new = [(sequence, count) for sequence, count in new if len(self.expected[sequence]) + count <= 15]
        if not new:
            return
        plan = self.table.plan(new)
        for source, target in plan.copies:
            self.slots.update({target * 3 + at: self.slots.get(source * 3 + at, -1) for at in range(3)})
        tokens = []
        for sequence, count in new:
            own = self.prompts_left[sequence][:count]
            self.prompts_left[sequence] = self.prompts_left[sequence][count:]
            own += [self.chance.randint(10, 99) for _ in range(count - len(own))]
            self.expected[sequence] += own
            tokens += own
        assert len(set(plan.slots.tolist())) == len(tokens)
        self.slots.update(zip(plan.slots.tolist(), tokens, strict=True))
        for row, (sequence, _) in zip(plan.block_table.tolist(), new, strict=True):
            pages = self.table.pages_of(sequence)
            assert row == pages + [0] * (len(row) - len(pages))

    def check(self):
        held = set()
        for sequence, tokens in self.expected.items():
            pages = self.table.pages_of(sequence)
            held.update(pages)
            assert [self.slots[pages[at // 3] * 3 + at % 3] for at in range(len(tokens))] == tokens
        assert self.table.free_pages_count == 10 - len(held)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_calls_keeps_every_sequence_what_it_is(seed):
    """Pages mix nothing up, and none is lost or held twice."""
    model = Model(seed)
    for step in range(400):
        actions = [model.begin]
        if model.expected:
            actions += [model.plan, model.plan, model.plan, model.fork, model.truncate, model.evict]
        try:
            model.chance.choice(actions)(step)
        except CacheFull:
            model.evict(step)
        model.check()
