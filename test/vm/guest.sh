#!/run/vm/busybox sh
# Runs as the first process of the guest after initramfs.sh. It runs
# /run/vm/command and writes its exit status to /run/vm/status. vm.sh has written
# /run/vm/settings, which sets kernel, version, modules and limit.
. /run/vm/settings
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH
# Applets are called as "$bb NAME": the shell can find them by their own names only
# when /proc is mounted, and programs of the root filesystem start slowly here.
bb=/run/vm/busybox

die() {
	echo "guest.sh: $*" >/dev/kmsg
	echo c >/proc/sysrq-trigger
}

$bb mount -t proc proc /proc
$bb mount -t devtmpfs dev /dev || die "mount /dev"
$bb mount -t sysfs sys /sys || die "mount /sys"
$bb ln -sfn /proc/self/fd /dev/fd
$bb ln -sfn /proc/self/fd/0 /dev/stdin
$bb ln -sfn /proc/self/fd/1 /dev/stdout
$bb ln -sfn /proc/self/fd/2 /dev/stderr
$bb mkdir -p "/lib/modules/$version" /run/lock
$bb mount -o bind "$kernel/lib/modules/$version" "/lib/modules/$version" || die "mount /lib/modules"
# As with systemd, mounts propagate to other mount namespaces.
$bb mount --make-rshared / || die "share the mounts"
for m in $modules; do
	modprobe "$m" || die "modprobe $m"
done
$bb hostname vm
$bb ifconfig lo 127.0.0.1 up

# A port can be opened only once. The command writes to pipes instead, so that it
# can open /dev/stdout and /dev/stderr again.
$bb mkfifo /run/stdout /run/stderr
for port in /dev/vport*p1; do port=${port%1}; done
[ -c "${port}1" ] && [ -c "${port}2" ] || die "no virtio ports for stdout and stderr"
$bb cat /run/stdout >"${port}1" &
out=$!
$bb cat /run/stderr >"${port}2" &
err=$!

$bb setsid $bb env -i /bin/bash /run/vm/command </dev/null >/run/stdout 2>/run/stderr &
command=$!
(
	$bb sleep "$limit"
	echo 7 >/proc/sys/kernel/printk
	echo "guest.sh: time limit; blocked tasks:" >/dev/kmsg
	echo w >/proc/sysrq-trigger
	: >/run/vm/timeout
	$bb kill -9 "-$command" "$command"
	$bb sleep 10
	echo b >/proc/sysrq-trigger
) &
wait "$command"
status=$?

# Processes that the command left running would keep the pipes open. Kernel
# threads, which have no executable, are skipped.
for p in /proc/[0-9]*; do
	p=${p#/proc/}
	case $p in 1 | "$out" | "$err") continue ;; esac
	[ -n "$($bb readlink "/proc/$p/exe")" ] && $bb kill -9 "$p"
done 2>/dev/null
# A process that is stuck in the kernel survives and keeps the pipes open.
($bb sleep 10 && $bb kill -9 "$out" "$err") &
wait "$out" "$err"
echo "$status" >/run/vm/status
echo b >/proc/sysrq-trigger
