"""All that a command or a user calls: open, inspect, plan, reshard, export, verify."""
