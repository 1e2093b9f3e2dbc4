#!/bin/bash
# Runs a command in the VM of test/vm with the modules for logical volumes and encryption, and with a configuration of
# LVM for a machine without udevd.
#
#   test/vm/vm.sh --disk SIZE --disk SIZE -- test/bench/lvm.sh COMMAND [ARG]...
set -euo pipefail

modprobe -a dm_mod dm_thin_pool dm_crypt
export LVM_SYSTEM_DIR=/run/lvm.bench DM_DISABLE_UDEV=1
mkdir $LVM_SYSTEM_DIR
cat >$LVM_SYSTEM_DIR/lvm.conf <<-'END'
	devices { obtain_device_list_from_udev=0 external_device_info_source="none" use_devicesfile=0 }
	global { use_lvmpolld=0 notify_dbus=0 event_activation=0 }
	activation { udev_sync=0 udev_rules=0 monitoring=0 }
	backup { backup=0 archive=0 }
END
exec "$@"
