"""Stores and providers of each kind, a fresh workspace for each check, and the known gaps with their reasons."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from runner.core.model import Handle
from runner.ports.store import RunnerRow, Store
from runner.providers import gvisor, kubernetes, process
from runner.sandbox.volume_docker import UID
from runner.store.memory import MemoryStore
from runner.store.sqlite import open_store
from runner.testing.agents import AgentCandidate
from runner.testing.place import Candidate
from runner.testing.plugin import is_shipped, judge
from tests.agents.record_transcripts import TRANSCRIPTS
from tests.agents.test_transcripts import CLIS
from tests.support.needs import POSTGRES
from tests.support.providers import (
    BY_VOLUMES,
    DOCKER,
    FAKE,
    GVISOR,
    KINDS,
    ORDINARY,
    PODMAN,
    PODS,
    PROCESS,
    REAL_PODS,
    ROOT_PODMAN,
    ROOTLESS,
    SIZED,
    VOLUMES,
    inhabitants,
    make,
)

_FAKE = "nothing is executed"
_HOST = "commands see this host"
_HOST_GAPS = dict.fromkeys(
    (
        "test_protected_paths_are_read_only_in_place_and_the_rest_is_writable",
        "test_writing_a_protected_file_fails_and_changes_nothing",
        "test_protected_paths_that_do_not_exist_are_no_error_and_cannot_be_created",
        "test_moving_the_parent_of_a_protected_path_away_fails",
        "test_a_protected_path_that_is_a_link_is_refused",
        "test_a_stand_in_that_a_crash_left_is_removed",
        "test_evicting_removes_the_stand_ins_of_a_killed_opening_and_nothing_else",
        "test_nothing_is_reachable_without_network",
        "test_the_host_cannot_be_seen",
        "test_isolation_read_back_is_what_holds",
        "test_a_dependency_is_in_the_tree_and_what_is_written_there_is_thrown_away",
        "test_dependencies_are_made_and_then_given_in_tree_and_home",
        "test_a_read_only_mount_cannot_be_written",
        "test_skills_and_the_kubeconfig_cannot_be_written",
        "test_paths_are_the_same_on_every_provider_with_mounts",
        "test_a_shared_workspace_has_the_project_where_a_workspace_is_else",
        "test_agents_of_a_project_cannot_change_which_workspaces_it_has",
        "test_another_tree_than_its_own_is_seen_alone",
        "test_an_isolated_workspace_sees_nothing_of_others_and_of_the_project",
        "test_an_isolated_workspace_of_a_project_is_at_workspace_and_lies_in_the_project",
    ),
    _HOST,
)
_ELSEWHERE = "the daemon keeps the files, and mounts nothing of this host"
_VOLUME_GAPS = dict.fromkeys(
    (
        "test_an_adopted_directory_is_the_tree_in_place_and_stays",
        "test_giving_changes_no_owner_in_an_adopted_directory",
        "test_a_directory_is_adopted_once_at_a_time",
        "test_evicting_an_adopted_workspace_leaves_its_user_s_other_processes",
        "test_a_directory_of_a_user_that_commands_do_not_run_as_is_refused",
        "test_dependencies_are_made_and_then_given_in_tree_and_home",
        "test_a_home_that_is_a_link_takes_no_dependency",
    ),
    _ELSEWHERE,
)
_POD_GAPS = dict.fromkeys(
    (
        "test_a_shared_workspace_is_in_its_project_which_it_sees_whole",
        "test_a_shared_workspace_has_the_project_where_a_workspace_is_else",
        "test_agents_of_a_project_cannot_change_which_workspaces_it_has",
        "test_another_tree_than_its_own_is_seen_alone",
        "test_ending_one_shared_workspace_leaves_the_others_alive",
        "test_a_project_is_isolated_or_not_at_one_time",
        "test_a_handle_of_another_project_or_shape_is_refused",
    ),
    "a pod sees nothing of this host, and so no directory of a project",
)
_UNSEEN = {
    "test_everything_ends_with_a_lost_guest_at_once_and_the_workspace_opens_again": (
        "the daemon numbers processes in a namespace of its own, so the check finds no guest to kill"
    )
}
_UIDS: dict[str, Callable[[Handle], int]] = {
    **{kind: lambda handle: UID for kind in BY_VOLUMES},
    **dict.fromkeys((PODS, REAL_PODS), kubernetes.uid_of),
}
_SHARED = {
    DOCKER: ("user",),
    VOLUMES: ("user",),
    PODMAN: ("cgroup",),
    ROOT_PODMAN: ("cgroup", "user"),
    **dict.fromkeys((PODS, REAL_PODS), ("cgroup", "user")),
}
_KILLED_WHOLE = "the host sees one program, and kills it whole"
KNOWN_GAPS: dict[str, dict[str, str]] = {
    GVISOR: {
        "test_memory_over_the_limit_ends_the_offender_and_says_why_and_the_workspace_lives": _KILLED_WHOLE,
        "test_kills_for_memory_are_counted_also_when_the_command_goes_on": _KILLED_WHOLE,
    },
    PROCESS: _HOST_GAPS,
    VOLUMES: _VOLUME_GAPS,
    **{kind: {**_VOLUME_GAPS, **_POD_GAPS} for kind in (PODS, REAL_PODS)},
    **{kind: {**_VOLUME_GAPS, **_UNSEEN} for kind in (PODMAN, ROOT_PODMAN, ROOTLESS)},
}

FAKE_PASSES = {
    "test_it_is_available_and_gives_a_reason_for_every_gap",
    "test_a_command_ends_with_its_own_status",
    "test_a_command_that_is_not_there_ends_with_127",
    "test_a_signal_is_told_from_success",
    "test_output_and_errors_are_separate",
    "test_output_over_the_bound_is_cut_and_says_so",
    "test_each_stop_stage_of_ending_a_command_is_told",
    "test_what_a_command_leaves_running_is_killed_and_told",
    "test_a_command_that_is_being_stopped_is_killed_when_its_sandbox_closes",
    "test_a_workspace_is_found_by_its_nonce_only",
    "test_a_command_that_does_not_read_its_input_is_no_error",
    "test_destroying_twice_is_no_error",
    "test_destroying_a_half_made_workspace_removes_the_rest",
    "test_directories_without_a_record_are_left_and_named",
    "test_destroying_leaves_nothing_of_a_hostile_tree",
    "test_a_handle_that_points_elsewhere_is_refused",
    "test_a_limit_that_cannot_be_kept_is_refused",
    "test_a_lost_workspace_is_said_so",
    "test_an_id_that_is_a_path_is_refused",
    "test_making_a_workspace_again_is_refused_and_leaves_the_first",
    "test_files_that_the_host_wrote_belong_to_the_workspace_user_after_chown",
    "test_a_project_is_isolated_or_not_at_one_time",
    "test_a_handle_of_another_project_or_shape_is_refused",
    "test_a_project_whose_name_is_a_path_is_refused",
    "test_giving_changes_no_owner_in_an_adopted_directory",
    "test_a_directory_is_adopted_once_at_a_time",
    "test_what_cannot_be_adopted_is_refused",
    "test_connections_to_the_workspace_s_own_loopback_are_served_from_outside",
    "test_nothing_listens_before_and_after_the_block",
    "test_a_connection_is_closed_when_its_server_returns_and_at_the_end_of_the_block",
    "test_what_happens_in_the_block_comes_out_as_it_is",
    "test_a_directory_of_a_user_that_commands_do_not_run_as_is_refused",
}

ALWAYS = {
    "test_it_is_available_and_gives_a_reason_for_every_gap",
    "test_a_command_ends_with_its_own_status",
    "test_no_descriptor_but_three_is_open",
    "test_nothing_is_reachable_without_network",
    "test_the_host_cannot_be_seen",
    "test_isolation_read_back_is_what_holds",
    "test_nobody_looks_into_the_guest_or_writes_to_what_is_its_own",
    "test_everything_ends_with_a_lost_guest_at_once_and_the_workspace_opens_again",
    "test_protected_paths_are_read_only_in_place_and_the_rest_is_writable",
    "test_writing_a_protected_file_fails_and_changes_nothing",
    "test_protected_paths_that_do_not_exist_are_no_error_and_cannot_be_created",
    "test_moving_the_parent_of_a_protected_path_away_fails",
    "test_an_isolated_workspace_sees_nothing_of_others_and_of_the_project",
    "test_a_shared_workspace_is_in_its_project_which_it_sees_whole",
    "test_each_stop_stage_of_ending_a_command_is_told",
    "test_no_kind_of_tree_outlives_its_block",
    "test_output_and_errors_are_separate",
}
BY_DAY = {  # of these kinds; the rest is for the night
    # what differs without root: how things are shown, and whose they are
    ORDINARY: ALWAYS
    | {
        "test_a_setuid_file_made_inside_gives_nothing_outside",
        "test_home_persists_and_a_fresh_one_does_not",
        "test_a_tree_that_is_not_writable_stays_untouched",
        "test_another_tree_can_be_shown_instead_even_one_of_the_host_s_own",
        "test_a_mounted_incident_can_be_read",
        "test_skills_and_a_kubeconfig_that_is_written_late_can_be_read",
        "test_skills_and_the_kubeconfig_cannot_be_written",
        "test_a_protected_path_that_is_a_link_is_refused",
        "test_destroying_leaves_nothing_of_a_hostile_tree",
        "test_a_directory_of_a_user_that_commands_do_not_run_as_is_refused",
        "test_connections_to_the_workspace_s_own_loopback_are_served_from_outside",
    },
    PROCESS: (ALWAYS - _HOST_GAPS.keys()) | {"test_a_signal_is_told_from_success"},
    # They share a class: volumes, mirrored trees and what a daemon does are what is particular here.
    VOLUMES: {
        "test_it_is_available_and_gives_a_reason_for_every_gap",
        "test_isolation_read_back_is_what_holds",
        "test_protected_paths_that_do_not_exist_are_no_error_and_cannot_be_created",
        "test_protected_paths_are_read_only_in_place_and_the_rest_is_writable",
        "test_moving_the_parent_of_a_protected_path_away_fails",
        "test_a_shared_workspace_is_in_its_project_which_it_sees_whole",
        "test_destroying_leaves_nothing_of_a_hostile_tree",
        "test_home_persists_and_a_fresh_one_does_not",
        "test_the_tree_is_read_from_here_as_its_commands_see_it",
    },
    PODS: {
        "test_it_is_available_and_gives_a_reason_for_every_gap",
        "test_isolation_read_back_is_what_holds",
        "test_protected_paths_that_do_not_exist_are_no_error_and_cannot_be_created",
        "test_moving_the_parent_of_a_protected_path_away_fails",
        "test_home_persists_and_a_fresh_one_does_not",
    },
    **{kind: set() for kind in (REAL_PODS, PODMAN, ROOT_PODMAN, ROOTLESS)},  # by day one whole run each
    # An opening takes half a second.
    GVISOR: (ALWAYS - {"test_no_kind_of_tree_outlives_its_block"})
    | {
        "test_a_fork_bomb_stays_under_its_limit",
        "test_an_isolated_workspace_of_a_project_is_at_workspace_and_lies_in_the_project",
        "test_what_takes_more_processor_than_it_may_is_throttled_and_lives",
        "test_over_the_limit_writes_fail_wherever_and_reads_and_deletes_go_on",
        "test_eight_mebibytes_pass_every_way_at_once_whatever_the_speed_of_each_reader",
    },
}


class _AllBut(dict[str, str]):
    """One reason for every check but some."""

    def __init__(self, passes: set[str], reason: str) -> None:
        self._passes, self._reason = passes, reason

    def get(self, name: str, default: str | None = None) -> str | None:
        return default if name in self._passes else self._reason

    def __contains__(self, name: object) -> bool:
        return name not in self._passes


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if not is_shipped(metafunc.function):
        judge(metafunc)


def pytest_runner_candidates() -> Sequence[Candidate]:
    return [_candidate(kind) for kind in KINDS]


def _candidate(kind: str) -> Candidate:
    escapes = {**{GVISOR: gvisor.GAPS, PROCESS: process.GAPS}.get(kind, {})}
    if kind in (PODMAN, ROOT_PODMAN):
        escapes["user-namespace"] = "podman's system call filter allows new user namespaces"
    if kind == REAL_PODS:
        escapes["network"] = "each pod has an interface, which its cluster closes: that it is is seen before a run"
    if kind == ORDINARY and os.geteuid() == 0:
        escapes["read-only"] = "root plays an ordinary user, and the kernel's settings are root's"
    return Candidate(
        name=kind,
        make=partial(make, kind),
        gaps=_AllBut(FAKE_PASSES, _FAKE) if kind == FAKE else KNOWN_GAPS.get(kind, {}),
        escapes=escapes,
        own_users=kind not in (ORDINARY, *BY_VOLUMES, PODS, REAL_PODS),
        disk_limit=kind in SIZED,
        pins_parents=kind not in (*BY_VOLUMES, PODS, REAL_PODS),
        interfaces=("lo", "eth0") if kind == REAL_PODS else ("lo",),
        shared_namespaces=_SHARED.get(kind, ()),
        uid=_UIDS.get(kind, lambda handle: handle.uid),
        inhabitants=inhabitants,
        marks=partial(_by_night, kind),
    )


def _by_night(kind: str, name: str, module: ModuleType) -> list[pytest.MarkDecorator]:
    """Checks that are known to fail are for the night as well: there one that passes is heard of soon enough."""
    late = name not in BY_DAY[kind] if kind in BY_DAY else kind in getattr(module, "BY_NIGHT", ())
    late |= kind == FAKE and name not in FAKE_PASSES
    return [pytest.mark.nightly] if late else []


def pytest_runner_agents() -> Sequence[AgentCandidate]:
    return [AgentCandidate(name="script"), *(AgentCandidate(name=name, finished=_finished(name)) for name in CLIS)]


def _finished(name: str) -> Path:
    return TRANSCRIPTS / name / "finished.jsonl"


class OpenOn(Protocol):
    def __call__(
        self, now: Callable[[], int], runner: RunnerRow | None = None
    ) -> AbstractAsyncContextManager[Store]: ...


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=POSTGRES.mark)])
def open_on(request: pytest.FixtureRequest, tmp_path: Path) -> OpenOn:
    """Open a store of each kind on a clock, for a runner or nobody."""
    if request.param == "memory":
        return lambda now, runner=None: nullcontext(MemoryStore(now, runner=runner))
    if request.param == "postgresql":
        from runner.store import postgresql
        from tests.support.postgres import fresh_url

        place = postgresql.place(fresh_url())
        return lambda now, runner=None: postgresql.open_store(place, now=now, entropy=bytes, runner=runner)
    return lambda now, runner=None: open_store(tmp_path / "state.db", now=now, entropy=bytes, runner=runner)


@pytest.fixture
async def store(open_on: OpenOn) -> AsyncIterator[Store]:
    async with open_on(count(1_000).__next__) as opened:
        yield opened
