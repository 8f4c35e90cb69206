"""Cache penetration: look-ups of keys that are in no cache and in no store behind it, so that all go through.

penetration
-----------
What it means: a pattern of keys (``user:{n}``), the keys of one first part (``user:{any}``) or a tenant (``{any}``)
gets many more look-ups than usual, and most of what is new misses and is never filled.

How it is found: over ``window_s``, look-ups per second are above ``qps_ratio`` times their baseline, and the miss
rate above ``miss_rate_ratio`` times its own (over a baseline of 1/4: the hit rate is below a third of it), in
``raise_cells_count`` of ``raise_of_cells_count`` windows in a row; and at least ``min_unfilled_share`` of the misses
are of keys that are neither known, nor were hit lately, nor filled since, and they are more than ``young_hits_ratio``
times the hits of keys that are new. So a flush, keys that expire together, a sale and new keys that are filled are
none. Not told apart, without KnownKeys, is a crawl of many existing keys, each looked up once. A pattern that is new
itself is learned for ``cold_start_s`` first; if it looks odd from its first look-up on, it is held against the miss
rate of all others after.

What to do: validate ids before the cache, answer unknown ones at once (a guard with KnownKeys), limit the source.

hot-missing-key
---------------
What it means: one key is looked up again and again, and is not there.

How it is found: above ``hot_key_miss_rate`` of its look-ups missed for ``hot_key_s``, at least
``hot_key_min_lookups_count`` of them. Keys of a pattern under a penetration alert do not fire by themselves.

What to do: cache that it does not exist, for a short time; or find out why it is not filled.

illegal-keys
------------
What it means: keys that exist nowhere are looked up at a rate that no mistake explains.

How it is found: ``illegal_per_s`` look-ups per second and more, over all patterns and tenants, missed and are of keys
that KnownKeys rules out (of what exists nowhere it misses at most its ``false_positive_share``).

What to do: as for penetration; the alert says which patterns and tenants most of them are of.
"""
