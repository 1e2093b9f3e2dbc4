#!/usr/bin/env bash
# Writes packages.lock: the current versions in Debian 12 of the packages from which the image is assembled, with
# their digests. apt verifies Debian's signatures. Needs Debian or a derived distribution.
set -euo pipefail
cd "$(dirname "$0")"
# base-files has the release of Debian and the license texts.
packages=(base-files e2fsprogs xfsprogs btrfs-progs libblkid1 libc6 libcom-err2 libext2fs2 libinih1 libudev1 liburcu8 libuuid1
	cryptsetup-bin libargon2-1 libcryptsetup12 libjson-c5 libpopt0 libssl3
	lvm2 libaio1 libbsd0 libcap2 libdevmapper1.02.1 libdevmapper-event1.02.1 libedit2 libgcrypt20 libgpg-error0 liblz4-1 liblzma5 libmd0 libpcre2-8-0 libselinux1 libsystemd0 libtinfo6 libzstd1 liblzo2-2 zlib1g)
architectures=(amd64 arm64)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache,etc/trusted.gpg.d,etc/preferences.d,etc/apt.conf.d}
touch "$work/status"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
cat >"$work/etc/sources.list" <<S
deb [signed-by=$keys] https://deb.debian.org/debian bookworm main
deb [signed-by=$keys] https://deb.debian.org/debian bookworm-updates main
deb [signed-by=$keys] https://deb.debian.org/debian-security bookworm-security main
S
cat >"$work/apt.conf" <<C
Dir::Etc "$work/etc";
Dir::State "$work";
Dir::State::status "$work/status";
Dir::Cache "$work/cache";
Acquire::Languages "none";
APT::Sandbox::User "root";
APT::Architecture "${architectures[0]}";
APT::Architectures {$(printf '"%s";' "${architectures[@]}")};
C
export APT_CONFIG=$work/apt.conf
snapshot=$(date -u +%Y%m%dT%H%M%SZ)
apt-get -qq update

{
	echo "# The Debian packages of the image: architecture, name, version, SHA-256, URL. Written by make image-lock."
	echo "# snapshot.debian.org has these packages at this time:"
	echo "snapshot $snapshot"
	for arch in "${architectures[@]}"; do
		for package in "${packages[@]}"; do
			(cd "$work" && apt-get download --print-uris "$package:$arch") | while read -r url file _ digest; do
				url=${url//\'/}
				version=$(cut -d_ -f2 <<<"$file")
				echo "$arch $package ${version//%3a/:} ${digest#SHA256:} $url"
			done
		done
	done
} >"$work/packages.lock"
[ "$(grep -c https: "$work/packages.lock")" = $((${#packages[@]} * ${#architectures[@]})) ] || { echo "lock.sh: apt does not list every package" >&2; exit 1; }
# An unchanged list keeps its time.
if ! diff -q -I '^snapshot ' packages.lock "$work/packages.lock" >/dev/null 2>&1; then cp "$work/packages.lock" packages.lock; fi
