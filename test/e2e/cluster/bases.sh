# shellcheck shell=bash disable=SC2154
# Sourced. The base images that the Dockerfile names, made here, as no registry is
# asked: Debian from its packages, with what the slim image has and leaves out.

# Left out of the slim image, now and in what apt installs later.
slim_excludes=(/usr/share/doc /usr/share/man /usr/share/info /usr/share/locale /usr/share/lintian)

debian_rootfs() {
	local root=$cache/debian work=$cache/debian.new d
	rm -rf "$work"
	debootstrap --variant=minbase bookworm "$work" >"$cache/debootstrap.log" || { tail "$cache/debootstrap.log"; return 1; }
	cat >"$work/etc/apt/sources.list" <<-S
		deb http://deb.debian.org/debian bookworm main
		deb http://deb.debian.org/debian bookworm-updates main
		deb http://deb.debian.org/debian-security bookworm-security main
	S
	for d in "${slim_excludes[@]}"; do
		find "$work$d" -type f ! -name copyright -delete 2>/dev/null || true
		find "$work$d" -type l -delete 2>/dev/null || true
		find "$work$d" -mindepth 1 -type d -empty -delete 2>/dev/null || true
		echo "path-exclude $d/*"
	done >"$work/etc/dpkg/dpkg.cfg.d/slim"
	echo "path-include /usr/share/doc/*/copyright" >>"$work/etc/dpkg/dpkg.cfg.d/slim"
	rm -rf "${work:?}"/var/lib/apt/lists/* "$work"/var/cache/apt/* "$work"/var/cache/ldconfig/* "$work"/var/log/*.log "$work"/var/log/apt/* "${work:?}"/dev/*
	: >"$work/etc/machine-id"
	# Those of the machine that made it.
	rm -f "$work/etc/hostname" "$work/etc/resolv.conf"
	rm -rf "$root"
	mv "$work" "$root"
}

# b is buildah, with storage of its own. The Dockerfile's cache mounts are under TMPDIR.
b() {
	BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} TMPDIR=$cache/tmp \
		buildah --root "$cache/containers" --runroot "$cache/containers-run" "$@"
}

# commit NAME FROM DIRECTORY TARGET [BUILDAH-CONFIG-FLAG]...
commit() {
	local name=$1 container mounted
	container=$(b from --pull-never "$2")
	mounted=$(b mount "$container")
	mkdir -p "$mounted$4"
	cp -a "$3/." "$mounted$4"
	b umount "$container" >/dev/null
	b config "${@:5}" "$container"
	b commit --quiet --rm --timestamp 0 "$container" "$name" >/dev/null
}

# Under the Dockerfile's names: Debian as above, and on top of it this machine's Go
# and the certificates that this machine trusts.
bases() {
	local debian golang certs
	debian=$(awk '$1 == "FROM" && $2 ~ /debian:/ {print $2; exit}' "$root/Dockerfile")
	golang=$(sed -n 's/^ARG GO_VERSION=/docker.io\/library\/golang:/p' "$root/Dockerfile")-bookworm
	commit "$debian" scratch "$cache/debian" / --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
	certs=$(mktemp -d "$cache/tmp/certs.XXXXXX")
	cp -L /etc/ssl/certs/ca-certificates.crt "$certs"
	commit "$golang-certificates" "$debian" "$certs" /etc/ssl/certs
	rm -r "$certs"
	commit "$golang" "$golang-certificates" "$(go env GOROOT)" /usr/local/go --env GOPATH=/go --env GOTOOLCHAIN=local \
		--env PATH=/go/bin:/usr/local/go/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
}
