#!/usr/bin/env bash
# machine.sh DIR COMMAND…: runs a command as on a machine where Trivet never was. DIR is a
# directory on a filesystem of its own, where all that the command writes goes: to an overlay
# of the root filesystem and of the current directory, and below /var/lib, where pools are,
# to DIR itself. $SHARED are directories that it shares with this machine. Everything that
# runs there, and is mounted there, ends with the command.
set -euo pipefail
if [ -z "${CLEAN_MACHINE:-}" ]; then
	CLEAN_MACHINE=1 exec unshare --mount --pid --fork --kill-child "$0" "$@"
fi
dir=$1 here=$(dirname "$(readlink -f "$0")") at=$PWD
shift
root=$dir/root
cover() { # cover DIRECTORY NAME: shows it on the machine, where it can be changed
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
# systemd is not there to ask: a stand-in starts and ends what the units say.
install -m 0755 "$here/systemctl" "$root/usr/local/sbin/systemctl"
mkdir -p "$root/old" "$root/etc/systemd/system"
pivot_root "$root" "$root/old"
cd "$at"
umount -l /old
rmdir /old
export PATH=/usr/local/sbin:/usr/local/bin:$PATH:/usr/sbin:/sbin
"$@"
