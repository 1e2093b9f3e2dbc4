#!/bin/busybox sh
# Runs as the first process of the guest, in the initramfs. It mounts an overlay
# of the host's root with a tmpfs, and switches to guest.sh there.
/bin/busybox --install -s /bin
PATH=/bin

die() {
	echo "initramfs.sh: $*" >/dev/kmsg
	echo c >/proc/sysrq-trigger
}

mkdir -p /proc /dev /host /upper /root
mount -t proc proc /proc && mount -t devtmpfs dev /dev || die "mount /proc, /dev"
for module in /modules/*; do
	insmod "$module" || die "insmod $module"
done
plan9() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$1" "$2" "$3"; }
plan9 ro,cache=loose root /host || die "mount the host's root"
mount -t tmpfs -o size=75% tmpfs /upper && mkdir /upper/files /upper/work || die "mount a tmpfs"
mount -t overlay -o lowerdir=/host,upperdir=/upper/files,workdir=/upper/work overlay /root || die "mount the overlay"
mkdir -p /root/proc /root/sys /root/dev /root/run
mount -t tmpfs -o mode=755 run /root/run && mkdir /root/run/vm || die "mount /run"
plan9 cache=none run /root/run/vm || die "mount /run/vm"
umount /dev /proc
exec switch_root /root /run/vm/busybox sh /run/vm/guest.sh
