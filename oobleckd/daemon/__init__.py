"""Shell 1: the asyncio daemon around the core: hub, HTTP API, journal, planning pool, configuration."""
