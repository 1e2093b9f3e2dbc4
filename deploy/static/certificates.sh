#!/bin/sh
# Creates the certificates of a cluster without Kubernetes, with openssl 3:
#   certificates.sh DIR NODE...
# DIR/ca.crt and DIR/ca.key are the CA. The script creates it if it is missing. DIR/controller and
# DIR/nodes/NODE are the directories for forwarding.certificates of the drivers. The script
# creates their certificates again each time, valid for a year. Copy each directory to its
# machine, and copy DIR/ca.key to none. The environment variable DRIVER is the name of the
# driver, by default csi.trivet.dev.
set -eu
driver=${DRIVER:-csi.trivet.dev}
dir=${1:?usage: certificates.sh DIR NODE...}
shift
umask 077
mkdir -p "$dir/nodes"

if [ ! -e "$dir/ca.key" ]; then
	openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -days 3650 -subj "/CN=$driver" \
		-addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign \
		-keyout "$dir/ca.key" -out "$dir/ca.crt"
fi

# issue DIRECTORY URI USAGE creates a key and a certificate in a directory.
issue() {
	mkdir -p "$1"
	openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -subj / -addext "subjectAltName=critical,URI:$2" \
		-addext "extendedKeyUsage=$3" -addext keyUsage=critical,digitalSignature -keyout "$1/tls.key" -out "$1/tls.csr"
	openssl x509 -req -in "$1/tls.csr" -copy_extensions copy -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -days 365 -out "$1/tls.crt"
	rm "$1/tls.csr"
	cp "$dir/ca.crt" "$1/"
}
issue "$dir/controller" "spiffe://$driver/controller" clientAuth
for node; do issue "$dir/nodes/$node" "spiffe://$driver/node/$node" serverAuth; done
