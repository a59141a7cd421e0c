"""An event loop with a signal handler and a subprocess."""

import asyncio
import os
import signal


async def main() -> list[object]:
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, came.set)
    os.kill(os.getpid(), signal.SIGUSR2)
    await asyncio.wait_for(came.wait(), 20)
    child = await asyncio.create_subprocess_exec("echo", "hello", stdout=asyncio.subprocess.PIPE)
    out, _ = await child.communicate()
    return [type(loop).__name__, out.decode(), child.returncode]


seen = {"loop": asyncio.run(main())}
