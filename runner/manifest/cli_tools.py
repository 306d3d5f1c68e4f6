"""The tools of its own that a CLI can be told to have, by its names for them.

Claude Code 2.1.330: those of many names, of documentation and older versions, that its stream lists when `--tools` asks
for them. Gemini CLI 0.61.0: its `ALL_BUILTIN_TOOL_NAMES`, without those that need a person at the terminal. Both on
22 November 2026. Codex and Goose cannot be told.
"""

from __future__ import annotations

WRITERS = {  # those with which a file can be written
    "claude": ("Bash", "Write", "Edit", "NotebookEdit"),
    "gemini": ("run_shell_command", "write_file", "replace"),
}
CLI_TOOLS = {
    "claude": (
        "Bash",
        "CronCreate",
        "CronDelete",
        "CronList",
        "Edit",
        "EnterWorktree",
        "ExitWorktree",
        "Glob",
        "Grep",
        "ListAgents",
        "Monitor",
        "NotebookEdit",
        "Read",
        "ReportFindings",
        "ScheduleWakeup",
        "SendMessage",
        "Skill",
        "Task",
        "TaskCreate",
        "TaskGet",
        "TaskList",
        "TaskStop",
        "TaskUpdate",
        "ToolSearch",
        "WebFetch",
        "WebSearch",
        "Workflow",
        "Write",
    ),
    "gemini": (
        "activate_skill",
        "get_internal_docs",
        "glob",
        "google_web_search",
        "grep_search",
        "invoke_agent",
        "list_directory",
        "list_mcp_resources",
        "read_file",
        "read_many_files",
        "read_mcp_resource",
        "replace",
        "run_shell_command",
        "update_topic",
        "web_fetch",
        "write_file",
        "write_todos",
    ),
}
