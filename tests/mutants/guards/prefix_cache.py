"""Guards of the prefix cache: whose KV is found, that it is whole and pinned, and what is told of it."""

from tests.mutants.mutant import Edit, Mutant, ledger, lua, twin

_CACHE = "tests/unit/protocol/test_prefix_cache.py::"
_POOL = "tests/unit/protocol/test_prefix_pool.py::"
_MOVER = "tests/unit/test_mover.py::"
_AT = "workers/mover.py"
_LEDGER = "tests/contract/ledger/test_cached_tokens.py::"


def _pool(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/prefix_cache.py", old, new),)


def _prefill(old: str, new: str) -> tuple[Edit, ...]:
    return (Edit("app/protocol/prefill/*.py", old, new),)


PREFIX_CACHE = (
    Mutant(
        "prefix-one-after-the-other",
        "what begins alike is computed once, also when it comes at once",
        _prefill("if not computed.isdisjoint(wanted[:1]):", "if False:"),
        (f"{_CACHE}test_prompts_that_begin_alike_are_computed_one_after_the_other",),
    ),
    Mutant(
        "prefix-salt",
        "nobody starts from the KV of another salt, or can time it",
        _pool("hashlib.sha256(salt.encode()).digest()", 'hashlib.sha256(b"").digest()'),
        (f"{_CACHE}test_another_salt_finds_nothing",),
    ),
    Mutant(
        "prefix-chain",
        "a block is known together with everything before it",
        _pool("hashlib.sha256(parent + block.pack(", "hashlib.sha256(block.pack("),
        (f"{_POOL}test_the_same_block_after_another_beginning_has_another_key",),
    ),
    Mutant(
        "prefix-last-token",
        "the last token of a prompt is computed: from nothing else come the logits",
        _prefill("self.pool.pin(keys[: num_blocks - 1], fence)", "self.pool.pin(keys, fence)"),
        (f"{_CACHE}test_the_last_token_of_a_prompt_is_always_computed",),
    ),
    Mutant(
        "prefix-last-token-in-line",
        "the last token of a prompt that stood in line is computed too",
        _prefill("keys = attempt.keys[: len(attempt.blocks) - 1]", "keys = attempt.keys"),
        (f"{_CACHE}test_what_is_computed_while_a_prompt_stands_in_line_it_need_not_compute",),
    ),
    Mutant(
        "prefix-in-line",
        "what was computed while a prompt stood in line is not computed again",
        _prefill("self._pin_more(fence, attempt) num_tokens =", "num_tokens ="),
        (f"{_CACHE}test_what_is_computed_while_a_prompt_stands_in_line_it_need_not_compute",),
    ),
    Mutant(
        "prefix-pinned",
        "a block is given away when the last of those that read it has let go of it",
        _pool("if others: continue", "if False:\n                continue"),
        (f"{_POOL}test_a_block_is_free_when_the_last_of_its_holders_has_given_it_back",),
    ),
    Mutant(
        "prefix-complete",
        "a block that a step may still write is known to nobody",
        _pool("if self._state[block] is not BlockState.HELD:", "if False:"),
        (f"{_POOL}test_what_a_step_may_still_write_is_not_published",),
    ),
    Mutant(
        "prefix-computed",
        "what no step has computed is known to nobody",
        _prefill("if sample.tokens: self._publish(", "if not sample.error:\n            self._publish("),
        (f"{_CACHE}test_an_answer_that_had_ended_already_was_not_computed",),
    ),
    Mutant(
        "prefix-in-doubt",
        "KV that an attempt failed with is not what the next one starts from",
        _prefill("if reason in _KV_IN_DOUBT:", "if False:"),
        (
            f"{_CACHE}test_an_engine_error_leaves_nothing_and_the_next_attempt_starts_from_nothing",
            f"{_CACHE}test_a_known_block_whose_bytes_have_changed_is_found_out_and_used_no_more",
        ),
    ),
    Mutant(
        "prefix-known-digest",
        "rule 6: a cached block is what it was when it was computed, or whoever pulls it finds out",
        (
            Edit(
                "workers/mover.py",
                "zip(job.blocks, job.known, strict=True) if not digest]",
                "zip(job.blocks, job.known)]",
            ),
            Edit(
                "workers/mover.py",
                "digest or next(new).hex() for digest in job.known",
                "next(new).hex() for _ in job.known",
            ),
        ),
        (f"{_MOVER}test_a_digest_that_is_known_stands_whatever_the_bytes_are_by_now",),
    ),
    Mutant(
        "prefix-digest-of-its-use",
        "a digest goes with the content that it was taken of",
        _pool('self._digest[block] = "" self._free.append(block)', "self._free.append(block)"),
        (f"{_POOL}test_a_cached_block_keeps_generation_and_digest_until_its_next_use",),
    ),
    Mutant(
        "prefix-longest-unused",
        "the longest unused block is evicted first",
        _pool("self._forget(next(iter(self._cached)))", "self._forget(next(reversed(self._cached)))"),
        (f"{_POOL}test_the_longest_unused_is_evicted_and_of_a_prefix_its_end",),
    ),
    Mutant(
        "prefix-end-first",
        "of a prefix the end goes before its beginning, without which it cannot be found",
        _pool("for block in reversed(blocks):", "for block in blocks:"),
        (f"{_POOL}test_the_longest_unused_is_evicted_and_of_a_prefix_its_end",),
    ),
    Mutant(
        "prefix-free-first",
        "nothing is evicted while a block is free",
        _pool("while len(self._free) < count:", "while self._cached and count:"),
        (f"{_POOL}test_what_is_free_is_taken_before_anything_is_evicted",),
    ),
    Mutant(
        "prefix-makes-room",
        "what is cached is room for others",
        _pool("return len(self._free) + len(self._cached)", "return len(self._free)"),
        (f"{_CACHE}test_a_node_full_of_cached_blocks_takes_a_prompt_that_needs_them_all",),
    ),
    ledger(
        "cached-tokens-of-the-first",
        "what is told as cached is of the attempt that drew the first token",
        lua=(
            lua(
                "if have == #tokens then set(r, 't:first_token', wall_ms(), 'cached_tokens', cmd.cached_tokens) end",
                "set(r, 'cached_tokens', cmd.cached_tokens)\n"
                "  if have == #tokens then set(r, 't:first_token', wall_ms()) end",
            ),
        ),
        twin=(twin("if not record.tokens: record.cached_tokens", "if True:\n        record.cached_tokens"),),
        tests=(f"{_LEDGER}test_the_first_token_carries_them_and_the_end_again",),
    ),
    ledger(
        "salt-of-the-request",
        "the salt of a request reaches whoever computes it",
        lua=(lua("salt = big[3] or '',", "salt = '',"),),
        twin=(twin("record.sampling, record.salt,", 'record.sampling,\n        "",'),),
        tests=(f"{_LEDGER}test_the_salt_reaches_prefill_and_decode_and_every_attempt",),
    ),
)
