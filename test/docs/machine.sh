#!/usr/bin/env bash
# machine.sh DIR COMMAND…: runs a command as on a machine where Trivet was never installed. The
# root filesystem and the current directory are overlays whose changes go to DIR, which must be
# on a separate filesystem. /var/lib, which contains the pools, is a directory in DIR.
# $SHARED lists directories that the command shares with this machine. When the command ends,
# its processes are killed and its mounts disappear.
set -euo pipefail
if [ -z "${CLEAN_MACHINE:-}" ]; then
	CLEAN_MACHINE=1 exec unshare --mount --pid --fork --kill-child "$0" "$@"
fi
dir=$1 here=$(dirname "$(readlink -f "$0")") at=$PWD
shift
root=$dir/root
cover() { # cover DIRECTORY NAME: mounts a writable overlay of DIRECTORY below $root
	mkdir -p "$dir/$2/"{upper,work} "$root$1"
	mount -t overlay -o "lowerdir=$1,upperdir=$dir/$2/upper,workdir=$dir/$2/work" machine "$root$1"
}
cover / system
cover "$at" checkout
mkdir "$dir/lib"
mount --bind "$dir/lib" "$root/var/lib"
for shared in /dev /sys ${SHARED:-}; do
	mkdir -p "$root$shared"
	mount --rbind "$shared" "$root$shared"
done
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/run"
# systemd does not run here. This replacement of systemctl starts and stops the units.
install -m 0755 "$here/systemctl" "$root/usr/local/sbin/systemctl"
mkdir -p "$root/old" "$root/etc/systemd/system"
pivot_root "$root" "$root/old"
cd "$at"
umount -l /old
rmdir /old
export PATH=/usr/local/sbin:/usr/local/bin:$PATH:/usr/sbin:/sbin
"$@"
