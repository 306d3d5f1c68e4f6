from runner.cli.main import entry

raise SystemExit(entry())
