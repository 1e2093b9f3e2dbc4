#!/bin/bash
# tlshd.sh: print the path of a program that runs tlshd, which NFS over TLS needs.
#
# Debian 12 has no package of tlshd. That of Debian 13 (ktls-utils) and its libraries
# are downloaded and unpacked once, and not installed. VM_CACHE is that of vm.sh.
set -euo pipefail

here=$(dirname "$(realpath "$0")")
cache=${VM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/trivet-vm}
unpacked=$cache/tlshd-$(cat "$here/tlshd.sh" "$here/suite.sh" | sha256sum | cut -c1-16)
. "$here/suite.sh"

if [ ! -e "$unpacked" ]; then
	mkdir -p "$cache"
	work=$(mktemp -d "$cache/unpacking.XXXXXX")
	trap 'rm -rf "$work"' EXIT
	cd "$work"
	{ use_suite trixie && of_suite apt-get install --download-only --no-install-recommends --yes ktls-utils; } >&2
	for package in cache/archives/*.deb; do dpkg -x "$package" files; done
	# The program needs the C library of its own suite.
	cat >files/tlshd <<-'END'
		#!/bin/bash
		files=$(dirname "$(realpath "$0")")
		lib=$files/usr/lib/x86_64-linux-gnu
		exec "$lib/ld-linux-x86-64.so.2" --library-path "$lib" "$files/usr/sbin/tlshd" "$@"
	END
	chmod +x files/tlshd
	# The mv fails if another run has unpacked the same packages in the meantime.
	mv -T files "$unpacked" 2>/dev/null || [ -d "$unpacked" ]
fi
echo "$unpacked/tlshd"
