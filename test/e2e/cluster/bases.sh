# shellcheck shell=bash disable=SC2154
# Sourced. Builds the base of the Debian image from packages, because no registry is used. It
# has the same files as the slim image of Debian.

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
