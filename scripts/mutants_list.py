"""The mutants, as data: each breaks one law of DESIGN, where the package keeps it, and names tests that must notice.

Texts are as short as they can be and still stand once in their file. Where the package changes and a text does not
stand there any more, write down the same break of the same law anew."""

from typing import NamedTuple

from mutants_tree import Break


class Mutant(NamedTuple):
    """`tests`: arguments of pytest, few seconds in all."""

    name: str
    law: str
    breaks: tuple[Break, ...]
    tests: tuple[str, ...]


_P = "fastdeploy_rl/"
_BOARD, _LAYOUT, _RENDEZVOUS = (f"{_P}board/{name}.py" for name in ("board", "layout", "rendezvous"))
_CONDUCTOR, _COORDINATOR, _STATE = (f"{_P}update/{name}.py" for name in ("conductor", "coordinator", "engine_state"))
_REQUESTS, _RECOVERY, _STEPS = (f"{_P}update/{name}.py" for name in ("requests", "recovery", "steps"))
_STANDBY, _STANDBY_COMMANDS = (f"{_P}update/{name}.py" for name in ("standby", "standby_commands"))
_TRANSACTION, _WAY_BACK = (f"{_P}update/{name}.py" for name in ("transaction", "way_back"))
_LEASES, _SHELF, _CHANNEL = (f"{_P}publish/{name}.py" for name in ("leases", "arena_shelf", "channel"))
_PARTICIPANT = f"{_P}update/participant.py"
_IPC = f"{_P}sources/ipc.py"
_MANAGER, _READER, _RECEIPT = f"{_P}manager.py", f"{_P}publish/channel_reader.py", f"{_P}receipt.py"

_STANDBY_TESTS = "tests/process/test_standby.py"
_RUNNER, _SCHEDULER, _PREFIXES = (f"{_P}engines/embedded/{name}.py" for name in ("runner", "scheduler", "prefix_cache"))
_SWITCHING = "tests/engines/test_switching_reference.py::test_a_runner_that_switches_says_what_the_reference_says"
_IN_FLIGHT = "tests/engines/test_in_flight.py"
_BORROWED = "tests/process/test_publish_borrowed.py"
_UNDO = "tests/unit/test_undo.py"
_TEST_BOARD = "tests/process/test_board.py"
_ON_BOARD = "tests/conformance/test_board_rendezvous.py"
_OF_IPC = "tests/conformance/test_ipc_source.py"
_FAULTY = "tests/process/test_faulty_sources.py"
_UPDATES = "tests/process/test_update_numpy.py"
_MISSED = "tests/process/test_missed_and_fenced.py"
_DEATH = "tests/process/test_rank_death.py"
_DAMAGED = "tests/process/test_damaged_snapshots.py"
_TCP = "tests/conformance/test_tcp_transport.py"
_VERIFY, _WORD, _LAWS = (
    "tests/unit/test_verify.py",
    "tests/unit/test_engine_state.py",
    "tests/process/test_laws_of_ranks.py",
)
_ONE_FAULT = f"{_FAULTY}::test_a_fault_at_one_rank_leaves_every_rank_on_its_version"
_LATE = f"{_MISSED}::test_a_boundary_after_the_deadline_undoes_and_the_engine_goes_on"
_A_TO_B = f"{_UPDATES}::test_a_to_b_to_a_is_bitwise_on_every_rank"
_AFTER_THE_WORD = f"{_LAWS}::test_a_rank_that_dies_right_after_the_commit_word_is_brought_forward"
_TOLD_TESTS = "tests/process/test_told_after_death.py"
_TOLD = f"{_TOLD_TESTS}::test_whoever_waits_is_told_of_the_commit_also_when_rank_0_dies_in_what_came_after"
_ANY_STEP = f"{_UNDO}::test_a_fault_at_either_end_of_any_step_is_undone"


def _mutant(name: str, law: str, file: str, text: str, instead: str, *tests: str) -> Mutant:
    return Mutant(name, law, (Break(file, text, instead),), tests)


MUTANTS = (
    # --- votes and decisions ---------------------------------------------------------------------------
    _mutant(
        "no_vote",
        "install is decided when every rank has voted STAGED",
        _CONDUCTOR,
        "error = self._await_ballots(command, Ballot.STAGED, excused)",
        "error = None",
        "tests/unit/test_conductor.py",
    ),
    _mutant(
        "refusal_not_heard",
        "one rank against it decides NO for all",
        _CONDUCTOR,
        "    against = [rank for rank, record in living.items() if is_against(record, command)]",
        "    against: list[int] = []",
        f"{_ONE_FAULT}[stage breaks-alias]",
    ),
    _mutant(
        "commit_before_verify",
        "commit is decided when every rank has voted VERIFIED",
        _CONDUCTOR,
        "objection = self._await_ballots(command, Ballot.VERIFIED, excused)",
        "objection = None",
        "tests/unit/test_conductor.py",
    ),
    _mutant(
        "install_without_decision",
        "a rank installs after the install decision YES only",
        _PARTICIPANT,
        "if self._decision(Question.INSTALL, record) is Decision.YES:",
        "if self._decision(Question.INSTALL, record) is not Decision.OPEN:",
        f"{_LAWS}::test_an_update_that_one_rank_refuses_stalls_none[alias]",
    ),
    _mutant(
        "no_undo_on_rank_2",
        "before the commit word every rank undoes",
        _PARTICIPANT,
        "self._follow(command.commit if is_committed else command.undo)",
        "self._follow(command.commit if is_committed or self.rank == 2 else command.undo)",
        f"{_LAWS}::test_every_rank_goes_back_when_one_fails_after_all_have_installed[copy]",
    ),
    _mutant(
        "undo_after_yes",
        "after the commit word every rank rolls forward",
        _PARTICIPANT,
        "is_committed = decision is Decision.YES",
        "is_committed = decision is Decision.YES and self.rank != 1",
        f"{_A_TO_B}[full-alias-2]",
    ),
    _mutant(
        "decision_not_compared",
        "a decision is set once, by compare-and-swap",
        _RENDEZVOUS,
        "_OFFSETS[question], layout.decision_word(command, Decision.OPEN), layout",
        "_OFFSETS[question], self._board.load(_OFFSETS[question]), layout",
        _ON_BOARD,
    ),
    _mutant(
        "stale_decision_followed",
        "a decision is that of its command",
        _RENDEZVOUS,
        "if (now := layout.command_in(word)) != command:",
        "if (now := layout.command_in(word)) < command:",
        _ON_BOARD,
    ),
    _mutant(
        "deadline_dropped",
        "whoever waits for a decision proposes NO at the deadline",
        _RENDEZVOUS,
        "is not Decision.OPEN, deadline_ns):",
        "is not Decision.OPEN, 2**62):",
        f"{_TEST_BOARD}::test_whose_deadline_passes_proposes_no",
    ),
    _mutant(
        "late_rank_tells_nobody",
        "what a late rank follows is decided for all",
        _RENDEZVOUS,
        "return self.decide_once(question, command, Decision.NO)",
        "return Decision.NO",
        _ON_BOARD,
    ),
    _mutant(
        "death_not_told",
        "a death decides NO where nothing is decided",
        _BOARD,
        "self.exchange(offset, word, word | layout.Decision.NO)",
        "continue",
        _ON_BOARD,
    ),
    _mutant(
        "commands_overlap",
        "no command is announced before every rank has finished the one before",
        _CONDUCTOR,
        "self._rendezvous.await_votes(self._unfinished, Ballot.FINISHED, deadline_ns, excused=excused)",
        "pass",
        "tests/unit/test_conductor.py",
    ),
    # --- steps and their undoing -----------------------------------------------------------------------
    _mutant(
        "undo_restores_nothing",
        "the undo of a copy brings the saved bytes back",
        _WAY_BACK,
        "transfer(copies(self.views, old.views), num_threads)",
        "return None",
        f"{_ANY_STEP}[copy-updated-keep]",
    ),
    _mutant(
        "undo_not_read_back",
        "a way back is no success before its bytes were read",
        _WAY_BACK,
        "check_sums(live_checksums(old.views, num_threads), old, rank)",
        "pass",
        f"{_UNDO}::test_a_way_back_that_was_corrupted_meanwhile_is_no_success",
    ),
    _mutant(
        "nothing_saved",
        "old bytes are saved while the engine serves, before a byte is overwritten",
        _STEPS,
        "kept.save(old, update.num_staging_threads)",
        "pass",
        f"{_ANY_STEP}[copy-updated-keep]",
    ),
    _mutant(
        "failed_step_not_undone",
        "the step that failed is undone as well",
        _TRANSACTION,
        "            self._begun.append(step)\n",
        "            self._begun[:] = [*self._begun, *steps[max(steps.index(step) - 1, 0) : steps.index(step)]]\n",
        f"{_ANY_STEP}[copy-updated-keep]",
    ),
    _mutant(
        "undone_in_order_of_doing",
        "steps are undone in reverse",
        _TRANSACTION,
        "in reversed(list(self._begun)):",
        "in list(self._begun):",
        f"{_ANY_STEP}[copy-updated-keep]",
    ),
    _mutant(
        "verify_skipped",
        "what apply mode copy installed is read back before the vote",
        _STEPS,
        "    if update.way != COPY:\n        return 0\n",
        "    if update.way:\n        return 0\n",
        f"{_VERIFY}::test_a_byte_of_a_copy_that_changed_after_the_install_is_found_before_the_vote",
    ),
    _mutant(
        "binding_not_verified",
        "what is bound is what was staged",
        _STEPS,
        "if astray or len(bound) != len(weights.views):",
        "if False:",
        f"{_VERIFY}::test_a_parameter_that_is_bound_elsewhere_than_staged_is_found_before_the_vote",
    ),
    _mutant(
        "audit_skipped",
        "aliased memory is read once more after the commit",
        _MANAGER,
        "elif not live.is_read_back:",
        "elif not live.is_read_back and self.rank > 99:",
        f"{_LAWS}::test_memory_that_changes_between_verify_and_commit_is_found_after_it_and_fences",
    ),
    _mutant(
        "kv_cache_kept",
        "KV blocks are keyed by the digest of the weights that filled them",
        _STEPS,
        "        update.runner.rebuild_kv_cache(digest)\n    return 0\n",
        "        pass\n    return 0\n",
        f"{_VERIFY}::test_the_kv_cache_is_filled_anew_under_the_digest_of_the_new_weights",
    ),
    _mutant(
        "staged_never_released",
        "a refused version is let go",
        _STEPS,
        "releasing.callback(_release_staged, update)",
        "pass",
        f"{_ANY_STEP}[alias-updated-keep]",
    ),
    _mutant(
        "copied_never_released",
        "what was copied is the trainer's again right after the commit",
        _TRANSACTION,
        "stack.callback(self._release_spent)",
        "pass",
        "tests/process/test_apply_modes.py::test_copies_hold_neither_lease_nor_mapping_of_what_was_published",
    ),
    # --- fences and the word ---------------------------------------------------------------------------
    _mutant(
        "fence_keeps_weights",
        "a fenced rank has no weights bound before it says that it has finished",
        _PARTICIPANT,
        "self._attempt(runner.unbind)",
        "pass",
        f"{_LAWS}::test_a_fenced_rank_drops_everything_before_it_says_that_it_has_finished",
    ),
    _mutant(
        "fence_keeps_kv_cache",
        "a fenced rank has no KV cache before it says that it has finished",
        _PARTICIPANT,
        "self._attempt(runner.drop_kv_cache)",
        "pass",
        f"{_LAWS}::test_a_fenced_rank_drops_everything_before_it_says_that_it_has_finished",
    ),
    _mutant(
        "fenced_reads_cleared",
        "a fenced engine reads UPDATING until everything is dropped",
        f"{_P}lifecycle.py",
        "return LegacyStatus.CLEARED if dropped else LegacyStatus.UPDATING",
        "return LegacyStatus.CLEARED",
        "tests/unit/test_lifecycle.py",
    ),
    _mutant(
        "fenced_may_resume",
        "a fenced engine serves again after a good update only",
        f"{_P}lifecycle.py",
        "    Admission.FENCED: {\n",
        "    Admission.FENCED: {\n        AdmissionEvent.RESUME: Admission.SERVING,\n",
        "tests/unit/test_lifecycle.py",
    ),
    _mutant(
        "cleared_too_early",
        "CLEARED is shown when every rank has freed weights and KV cache",
        _STANDBY,
        "        self._state.pause()\n",
        "        self._state.pause()\n        self._state.weights_word.store(-2)\n",
        f"{_LAWS}::test_cleared_is_not_shown_while_one_rank_has_not_freed_its_memory",
    ),
    _mutant(
        "admission_closed_late",
        "admission closes before a rank is asked for anything",
        _STANDBY,
        "        self._state.pause()\n",
        "        pass\n",
        f"{_STANDBY_TESTS}::test_weights_come_back_from_sleep",
    ),
    _mutant(
        "update_ends_a_pause",
        "an update leaves a paused engine paused",
        _STATE,
        "if ends_pause and not self.asleep:",
        "if not self.asleep:",
        f"{_STANDBY_TESTS}::test_an_update_leaves_a_paused_engine_paused",
    ),
    _mutant(
        "served_half_awake",
        "nothing is served before all tags are awake",
        _STATE,
        "may_serve = not self.is_held and set(lifecycle.residencies) == {Residency.RESIDENT}",
        "may_serve = not self.is_held and lifecycle.weight is Residency.RESIDENT",
        f"{_STANDBY_TESTS}::test_tags_sleep_and_wake_one_at_a_time_in_any_order_and_twice",
    ),
    _mutant(
        "sleeper_woken_by_an_update",
        "an update leaves asleep what nobody woke",
        _STATE,
        "wanted = frozenset(Tag) - (self.asleep - woken)",
        "wanted = frozenset(Tag)",
        f"{_STANDBY_TESTS}::test_an_update_brings_the_weights_and_leaves_the_rest_asleep",
    ),
    _mutant(
        "lost_copies_served",
        "weights that slept in the memory of a dead rank are nobody's",
        _STATE,
        "is_held = bool(self.source) and self.lifecycle.weight is not Residency.OFFLOADED",
        "is_held = bool(self.source)",
        f"{_STANDBY_TESTS}::test_a_death_while_weights_sleep_in_host_memory_leaves_nothing_and_a_wake_brings_the_newest[1]",
    ),
    _mutant(
        "unchecked_offload",
        "what goes to sleep in host memory is what was committed",
        _STANDBY_COMMANDS,
        "            check_sums(self._copy.sums, live, self._state.runner.rank)\n",
        "            pass\n",
        f"{_STANDBY_TESTS}::test_a_sleep_that_one_rank_cannot_do_leaves_all_awake",
    ),
    _mutant(
        "wake_not_undone",
        "a wake that one rank cannot do leaves all asleep",
        _STANDBY_COMMANDS,
        "            runner.unbind()\n            self._is_bound = False\n",
        "            self._is_bound = False\n",
        f"{_STANDBY_TESTS}::test_a_wake_that_one_rank_cannot_do_leaves_all_asleep",
    ),
    _mutant(
        "word_not_compared",
        "the word is stored by compare-and-swap: what a trainer wrote meanwhile is the next command",
        _STATE,
        "self._weights_word.exchange(expected, wanted)",
        "self._weights_word.exchange(self._weights_word.load(), wanted)",
        _WORD,
    ),
    _mutant(
        "equal_stores_run_twice",
        "equal stores of the legacy word coalesce",
        _STATE,
        "self._pending, self._shown = LegacyCommand(value), LegacyStatus(value)",
        "self._pending = LegacyCommand(value)",
        _WORD,
    ),
    # --- the board -------------------------------------------------------------------------------------
    _mutant(
        "record_not_checked",
        "one flipped bit of a record makes no other record",
        _LAYOUT,
        "return data if is_whole or not any(copy) else None",
        "return data",
        f"{_TEST_BOARD}::test_a_flipped_bit_in_a_record_is_no_other_record",
    ),
    _mutant(
        "single_copy",
        "a writer that dies leaves the former record whole",
        _LAYOUT,
        "return COUNTER_BYTES + (counter & 1) * (size + -size % 8)",
        "return COUNTER_BYTES + 0 * (size + -size % 8)",
        f"{_TEST_BOARD}::test_a_writer_that_dies_inside_a_write_leaves_the_record_before_it",
    ),
    _mutant(
        "dead_client_keeps_slot",
        "the slot of a dead client is free again",
        _REQUESTS,
        "lock.unlink()\n            board.exchange(offset, word, SlotState.FREE)",
        "lock.unlink()",
        f"{_TEST_BOARD}::test_the_slot_of_a_dead_client_is_free_again",
    ),
    _mutant(
        "newest_request_first",
        "requests are carried out in the order of their tickets",
        _REQUESTS,
        "return min(submitted)[1:] if submitted else None",
        "return max(submitted)[1:] if submitted else None",
        f"{_LAWS}::test_requests_are_carried_out_in_the_order_in_which_they_were_asked_for",
    ),
    _mutant(
        "request_forgotten",
        "whoever waits on a rank 0 that died is told what became of it",
        _REQUESTS,
        "left.append(BoardRequest(board, slot, layout.slot_token(word), record))",
        "continue",
        f"{_LAWS}::test_a_request_that_was_begun_by_a_rank_0_that_died_is_found_by_the_next_one",
    ),
    # --- a dead rank -----------------------------------------------------------------------------------
    Mutant(
        "successor_keeps_wrong_version",
        "a rank that comes back holds the committed version",
        (
            Break(_PARTICIPANT, "live is not None and live.version == version:", "live is not None:"),
            Break(_MANAGER, "return committed is not None and committed.is_cold", "return True"),
        ),
        (f"{_DEATH}::test_a_rank_that_dies_after_an_update_comes_back_to_it_from_the_channel[1-alias]",),
    ),
    _mutant(
        "restored_not_compared",
        "an engine that recovered holds what was committed, by its digest",
        _RECOVERY,
        "if merged.content_digest != committed.content_digest:",
        "if False:",
        f"{_LAWS}::test_a_rank_that_comes_back_with_other_weights_than_it_left_fences",
    ),
    _mutant(
        "silent_rank_left_alone",
        "a rank that is silent after the install is condemned, and comes back to what was committed",
        _CONDUCTOR,
        "self._condemn(rank)",
        "pass",
        f"{_LAWS}::test_a_rank_that_stands_still_inside_the_install_is_ended_and_comes_back[2]",
    ),
    _mutant(
        "silent_leader_left_alone",
        "rank 0 is looked after by the next rank",
        _MANAGER,
        "self._board.condemn(0)",
        "pass",
        f"{_LAWS}::test_a_rank_that_stands_still_inside_the_install_is_ended_and_comes_back[0]",
    ),
    _mutant(
        "death_not_looked_for",
        "death is a lost lock, also where nobody starts ranks again",
        _RECOVERY,
        "self._rendezvous.mark_lost(rank)",
        "pass",
        "tests/unit/test_recovery.py",
    ),
    _mutant(
        "commit_word_forgotten",
        "a version is committed from the moment in which its commit word reads YES",
        f"{_P}update/committed.py",
        "return command if command.number > status.command and was_committed(board, command) else None",
        "return None",
        f"{_AFTER_THE_WORD}[0]",
    ),
    _mutant(
        "commit_denied",
        "whoever asked is told what the commit word says, though rank 0 died",
        _COORDINATOR,
        "committed = last.number if was_committed(self._board, last) else 0",
        "committed = 0",
        f"{_AFTER_THE_WORD}[0]",
    ),
    _mutant(
        "told_of_another_request",
        "whoever asked is told of their own command, though rank 0 died before it announced that",
        _REQUESTS,
        "Decision.YES if committed and layout.command_in(fate) == committed else Decision.NO",
        "Decision.YES if committed else Decision.NO",
        f"{_TOLD_TESTS}::test_nobody_is_told_done_of_an_update_that_was_never_announced",
    ),
    _mutant(
        "commit_not_written_down",
        "whoever asked is told of their own command, whatever commands came after it",
        _COORDINATOR,
        "            request.commit()\n",
        "",
        f"{_TOLD}[1]",
    ),
    _mutant(
        "lost_after_commit_not_restored",
        "a rank that died right after the commit is brought forward before the engine serves",
        _COORDINATOR,
        "        if outcome.lost:\n            self._fence_without(",
        "        if False:\n            self._fence_without(",
        f"{_AFTER_THE_WORD}[2]",
    ),
    # --- leases and the channel ------------------------------------------------------------------------
    _mutant(
        "publisher_ignores_leases",
        "bytes under a live lease never change",
        _LEASES,
        "        holders = self.holders(arena)\n        if holders:\n            self.cancel_write(arena)\n",
        "        holders: tuple[HolderInfo, ...] = ()\n",
        "tests/unit/test_leases.py",
    ),
    _mutant(
        "read_before_lease",
        "a lease is taken before the generation is read",
        _LEASES,
        "        slot = self._claim_slot(arena, token)\n        if self.generation(arena) != generation:",
        "        found = self.generation(arena)\n        slot = self._claim_slot(arena, token)\n"
        "        if found != generation:",
        "tests/unit/test_leases.py",
    ),
    _mutant(
        "lease_of_the_dead_stands",
        "leases of dead holders are void",
        _LEASES,
        "            if is_alive(lock):\n",
        "            if lock:\n",
        "tests/unit/test_leases.py",
    ),
    _mutant(
        "no_lease_taken",
        "an engine holds a lease while it reads",
        _READER,
        "undo.callback(lease.release)",
        "lease.release()",
        f"{_OF_IPC}::test_a_lease_keeps_the_publisher_out_until_it_is_released",
    ),
    _mutant(
        "half_stage_leaks",
        "a version that could be staged by half leaves no lease",
        _READER,
        "undo.callback(lease.release)",
        "pass",
        f"{_OF_IPC}::test_a_manifest_that_points_at_another_segment_is_refused_and_leaves_no_lease",
        f"{_OF_IPC}::test_a_segment_of_another_size_is_refused_and_leaves_no_lease",
    ),
    _mutant(
        "arena_mapped_writable",
        "engines map published arenas read-only",
        _READER,
        "mapped or SharedSegment.attach(segment.locator)",
        "mapped or SharedSegment.attach(segment.locator, writable=True)",
        f"{_OF_IPC}::TestIpcSource::test_staged_memory_cannot_be_written",
    ),
    _mutant(
        "always_vouched",
        "borrowed memory whose trainer is gone is vouched for by nobody",
        _READER,
        "return self.is_released or all(lender.is_there for lender in self._lenders)",
        "return True",
        f"{_OF_IPC}::test_borrowed_memory_is_not_vouched_for_when_its_trainer_is_gone_and_another_in_its_place",
    ),
    _mutant(
        "withdrawn_too_late",
        "a former manifest goes before a byte of its arena is written",
        _SHELF,
        "            self._on_change(row)\n            segment = self._fit(row, num_bytes)\n",
        "            segment = self._fit(row, num_bytes)\n",
        f"{_OF_IPC}::test_a_former_version_is_withdrawn_before_a_byte_of_its_arena_is_written",
    ),
    _mutant(
        "unannounced_taken",
        "what is newer than the latest version was announced by nobody",
        _IPC,
        "if version < latest else None",
        "if version != latest else None",
        f"{_OF_IPC}::test_a_manifest_that_was_never_the_latest_is_not_found",
    ),
    _mutant(
        "epoch_not_counted",
        "each publisher of a channel has an epoch of its own",
        _CHANNEL,
        "epoch = max(self.read_epoch(), published) + 1",
        "epoch = max(self.read_epoch(), published, 1)",
        "tests/unit/test_channel.py",
    ),
    _mutant(
        "latest_written_in_place",
        "a reader never sees half a file",
        f"{_P}publish/durable_files.py",
        'unfinished = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")',
        "unfinished = path\n    unfinished.unlink(missing_ok=True)",
        "tests/unit/test_channel.py",
    ),
    _mutant(
        "link_followed",
        "no file of a channel leads out of it",
        f"{_P}memory/regular_file.py",
        "flags if follows_links else flags | os.O_NOFOLLOW",
        "flags",
        "tests/unit/test_channel.py::test_a_latest_that_is_a_symbolic_link_is_refused",
    ),
    _mutant(
        "taken_back_while_leased",
        "a trainer changes memory that it lent when nobody leases it any more",
        f"{_P}publish/trainer_memory.py",
        "self._table.wait_free([row], deadline_ns)",
        "self._table.holders(row) or self._table.wait_free([row], deadline_ns)",
        f"{_BORROWED}::test_waiting_names_the_engine_that_still_holds_the_memory_and_changes_nothing",
    ),
    _mutant(
        "open_channel_used",
        "a channel that others can enter is not used",
        f"{_P}memory/private_directory.py",
        "if stat.S_IMODE(status.st_mode) & 0o077:",
        "if stat.S_IMODE(status.st_mode) & 0o1000:",
        "tests/unit/test_channel.py::test_a_channel_that_others_can_enter_is_refused",
    ),
    _mutant(
        "dead_engine_waited_for",
        "whoever waits on an engine that dies is told at once",
        f"{_P}update/client.py",
        "            if not self._board.is_owner_alive():\n                raise PeerLostError(",
        "            if self._is_abandoned:\n                raise PeerLostError(",
        "tests/process/test_board_pressure.py::test_whoever_waits_for_a_slot_of_a_dying_engine_is_told",
    ),
    # --- proof -----------------------------------------------------------------------------------------
    _mutant(
        "digest_copied",
        "a receipt's content digest is computed from what was read",
        _RECEIPT,
        "content_digest=content_digest_of(layout_digest, sums)",
        "content_digest=layout_digest",
        "tests/unit/test_receipt.py",
    ),
    _mutant(
        "reads_not_compared",
        "what all ranks read together is what was published",
        _COORDINATOR,
        "check_reads(merged, {tensor.name: tensor.checksum for tensor in manifest.tensors})",
        "pass",
        f"{_ONE_FAULT}[bytes differ-alias]",
    ),
    _mutant(
        "recompute_hides",
        "a recomputed receipt tells every parameter that is not what it says",
        _RECEIPT,
        "if part.live.get(name) != by_rank[part.rank]",
        "if part.live.get(name) is None",
        f"{_MISSED}::test_a_mismatch_that_recompute_found_does_not_hide",
    ),
    _mutant(
        "version_goes_back",
        "versions do not go back unless that is forced",
        _COORDINATOR,
        "if last and version < WeightVersion.parse(last) and not request.is_forced:",
        "if False:",
        f"{_UPDATES}::test_a_version_that_goes_back_is_refused_unless_forced",
    ),
    _mutant(
        "coverage_not_checked",
        "a publication feeds every parameter, and nothing else",
        f"{_P}coverage.py",
        "    if problems:\n        raise CoverageError",
        "    if False:\n        raise CoverageError",
        "tests/unit/test_coverage.py",
    ),
    _mutant(
        "bounds_not_checked",
        "every part of a manifest lies inside its segment",
        f"{_P}manifest.py",
        "    if stop > segment.num_bytes:",
        "    if False:",
        "tests/unit/test_manifest.py::test_a_bad_tensor_is_refused_by_name",
    ),
    _mutant(
        "overlap_not_checked",
        "no two parts of a manifest share a byte",
        f"{_P}manifest.py",
        "if before[0] == after[0] and after[1] < before[2]:",
        "if False:",
        "tests/unit/test_manifest.py::test_tensors_that_share_bytes_are_refused",
    ),
    _mutant(
        "any_key_opens",
        "a request without a known key reaches no guarded route",
        f"{_P}control/api_key.py",
        'return scheme.lower() == b"bearer" and any(matches)',
        'return scheme.lower() == b"bearer" and bool(matches)',
        "tests/engines/test_http_api_key.py::test_without_a_known_key_nothing_happens",
    ),
    _mutant(
        "withdrawn_memory_is_read_on",
        "memory that is wanted back is read by nobody when it was withdrawn",
        f"{_P}sources/held_versions.py",
        "            reader.on_withdraw()",
        "            pass",
        "tests/unit/test_held_versions.py::test_withdrawn_memory_is_nobodys_any_more",
    ),
    # --- files, the wire, and memory that is filled from them ----------------------------------------------
    _mutant(
        "order_of_regions_ignored",
        "what lies in an arena as it is, is the parameter: its regions in the order of the target, without a gap",
        f"{_P}plan/gathering.py",
        "or region.target_offset != filled:",
        "or False:",
        "tests/unit/test_gathering.py::test_regions_out_of_the_order_of_their_target_do_not_land_whole",
    ),
    _mutant(
        "resumed_from_the_start",
        "a lost connection goes on where it stopped",
        f"{_P}transport/buckets.py",
        "        skip = self.num_landed - self._complete_bytes",
        "        skip = 0",
        f"{_TCP}::test_a_lost_connection_goes_on_where_it_stopped",
    ),
    _mutant(
        "any_secret_will_do",
        "who cannot prove the secret is served nothing",
        f"{_P}transport/wire.py",
        "    return hmac.compare_digest(given, proof)",
        "    return True",
        f"{_TCP}::test_ends_that_do_not_share_a_secret_do_not_speak",
    ),
    _mutant(
        "wrong_bytes_written_out",
        "a snapshot of bytes that are not what was published is never finished",
        f"{_P}publish/snapshot_writer.py",
        "    stream.check_sums()",
        "    pass",
        "tests/process/test_snapshot_writer.py::test_bytes_that_are_not_what_was_published_never_become_a_snapshot",
    ),
    _mutant(
        "snapshot_digest_not_checked",
        "the manifest of a snapshot has the digest of its directory's name",
        f"{_P}publish/snapshot_directory.py",
        '        if not entry.name.endswith(f"-{digest[:16]}"):',
        "        if False:",
        f"{_DAMAGED}::test_a_damaged_version_is_refused_by_name_and_nothing_changed[change_manifest]",
        "tests/conformance/test_snapshot_source.py",
    ),
    _mutant(
        "damaged_version_taken_for_the_last",
        "where the newest version is damaged, the next older whole one is taken",
        _COORDINATOR,
        "            return self._undamaged(tried, request)",
        "            return None",
        f"{_DAMAGED}::test_an_engine_comes_up_on_the_newest_version_that_is_whole[flip]",
    ),
    _mutant(
        "files_used_in_place_unasked",
        "apply mode auto lies in no file that somebody may cut",
        f"{_P}update/apply_choice.py",
        "    if is_copied_unless_asked:\n",
        "    if False:\n",
        "tests/process/test_apply_modes.py::test_files_are_used_in_place_only_where_that_is_asked_for",
    ),
    _mutant(
        "copied_in_place_without_checksums",
        "apply mode auto overwrites live weights only where that can be undone",
        f"{_P}update/apply_choice.py",
        'return "" if facts.has_checksums else "it takes checksums to undo"',
        'return ""',
        "tests/unit/test_auto_apply.py::test_a_rank_without_memory_or_checksums_does_not_copy_in_place",
    ),
    _mutant(
        "woken_unchecked",
        "weights that slept in host memory are checked before they are bound",
        f"{_P}update/standby_commands.py",
        "            check_sums(sums, new, state.runner.rank)\n",
        "            pass\n",
        "tests/unit/test_standby_commands.py::"
        "test_weights_that_do_not_come_back_from_host_memory_go_on_sleeping_there[corrupt]",
    ),
    _mutant(
        "sleeping_memory_kept",
        "what sleeps gives its memory back to the system",
        f"{_P}update/standby_commands.py",
        "        state.arenas.drop()\n",
        "        pass\n",
        "tests/unit/test_standby_commands.py::"
        "test_all_memory_returns_and_what_sleeps_in_host_memory_wakes_to_the_byte[alias-1]",
    ),
    _mutant(
        "arena_handed_out_in_use",
        "an arena in which a parameter lies is not filled again",
        f"{_P}sources/fetching.py",
        '        check_unused(arena, f"the memory of version {self._offer.version}")',
        "        pass",
        "tests/conformance/test_rsync_source.py::TestRsyncSource::test_memory_that_is_still_looked_at_is_not_released",
    ),
    _mutant(
        "changed_files_taken",
        "files that changed while they were read are no version",
        f"{_P}transport/files.py",
        "        if (status.st_size, status.st_mtime_ns) != (expected.num_bytes, expected.mtime_ns):",
        "        if False:",
        "tests/unit/test_file_fetch.py::test_a_file_that_changed_while_it_was_read_ends_the_fetch",
    ),
    _mutant(
        "any_global_called",
        "nothing that a pickle names is called but what an array is made of",
        f"{_P}memory/saved_state.py",
        "        if known not in _NAMES:",
        "        if False:",
        "tests/unit/test_saved_state.py::test_nothing_is_imported_or_called",
    ),
    _mutant(
        "half_a_group_bound",
        "several models change together or none does",
        f"{_P}model_group.py",
        "going_back.callback(member.put_back, member.runner.bound())",
        "pass",
        "tests/conformance/test_model_group.py::test_a_member_that_cannot_bind_leaves_all_where_they_were",
    ),
    _mutant(
        "frozen_model_let_go",
        "what was loaded and is no update's stays as it was loaded",
        f"{_P}model_group.py",
        "        for member in self._updated:\n            member.runner.unbind()",
        "        for member in self._members:\n            member.runner.unbind()",
        "tests/conformance/test_model_group.py::test_a_frozen_member_is_bound_once_and_never_touched_again",
    ),
    _mutant(
        "kept_cache_computed_anew",
        "requests in flight go on with the keys and values that they have where that was asked for",
        _RUNNER,
        "self._use_weights(content_digest, keeps_kv=True)",
        "self._use_weights(content_digest, keeps_kv=False)",
        _SWITCHING,
    ),
    _mutant(
        "rebuilt_cache_kept",
        "after a rebuild nothing counts that older weights made",
        _RUNNER,
        "self._use_weights(content_digest, keeps_kv=False)",
        "self._use_weights(content_digest, keeps_kv=True)",
        _SWITCHING,
    ),
    _mutant(
        "prefix_of_other_weights_hit",
        "a new request never hits keys and values of other weights",
        _PREFIXES,
        "self._digest = content_digest.encode()",
        'self._digest = b""',
        f"{_IN_FLIGHT}::test_what_the_same_weights_left_may_be_used_when_they_come_back[rsync copy 1]",
    ),
    _mutant(
        "mixed_chain_entered",
        "a new request never hits a chain of mixed versions",
        _SCHEDULER,
        "            item.chain = None\n        num_full",
        "            pass\n        num_full",
        f"{_IN_FLIGHT}::test_what_the_same_weights_left_may_be_used_when_they_come_back[rsync copy 1]",
    ),
    _mutant(
        "half_computed_prompt_kept",
        "no token owes anything to a version that its answer does not name",
        _SCHEDULER,
        "            self._preempt_unfinished()",
        "            pass",
        "tests/engines/test_switching_reference.py::"
        "test_a_prompt_that_was_half_computed_begins_again_under_the_new_weights",
    ),
    _mutant(
        "kept_cache_lost_with_weights",
        "keys and values that are awake outlive weights that sleep at level 2, where that was asked for",
        _STEPS,
        "    if update.kv_policy == KEEP:\n        update.runner.keep",
        "    if update.kv_policy == KEEP and update.old is not None:\n        update.runner.keep",
        "tests/engines/test_fifty_clients.py",
    ),
    _mutant(
        "stale_graph_replayed",
        "a graph whose addresses are not bound is never replayed",
        f"{_P}engines/embedded/graph_pool.py",
        "if self._active is not None and self._is_stale(self._active):",
        "if False:",
        "tests/unit/test_graph_pool.py::test_a_stale_graph_is_refused_and_computes_nothing",
    ),
    _mutant(
        "staleness_not_asked",
        "a request begins on no weights that are older than it takes",
        f"{_P}engines/embedded/admission.py",
        "        if behind <= self.max_staleness:\n",
        "        if True:\n",
        "tests/unit/test_admission.py",
    ),
)
