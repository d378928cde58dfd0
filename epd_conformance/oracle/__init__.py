"""The judges: pure functions from raw evidence (answers, journals) to what it proves. Nothing here touches a process."""
