# shellcheck shell=bash disable=SC2154
# Sourced. Builds the base images that the Dockerfile names, because no registry is
# used. The Debian image is built from packages and has the same files as the slim
# image of Debian.

# Directories that the slim image excludes, also from packages that apt installs later.
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
	# debootstrap has copied these files from the machine.
	rm -f "$work/etc/hostname" "$work/etc/resolv.conf"
	rm -rf "$root"
	mv "$work" "$root"
}

# b runs buildah with a private storage. The Dockerfile's cache mounts are below TMPDIR.
b() {
	BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} TMPDIR=$cache/tmp \
		buildah --root "$cache/containers" --runroot "$cache/containers-run" "$@"
}

# commit NAME FROM DIRECTORY TARGET [BUILDAH-CONFIG-FLAG]...: builds the image NAME from
# the image FROM and the files in DIRECTORY, which it copies to TARGET.
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

# bases builds the images with the names in the Dockerfile: Debian, and on top of it an
# image with the Go and the trusted certificates of this machine.
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
