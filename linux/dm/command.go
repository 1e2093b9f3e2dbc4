package dm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/sys"
)

// Package is the name of the package with lvm(8) in Debian and most distributions.
const Package = "lvm2"

// Errors of commands.
var (
	// ErrInUse means that the device of a logical volume is open or mounted.
	ErrInUse = errors.New("logical volume is in use")
	// ErrNoRoom means that the group has too few free extents.
	ErrNoRoom = errors.New("volume group has too few free extents")
	// ErrMissing means that the group has no such logical volume.
	ErrMissing = errors.New("logical volume does not exist")
)

// lockDir is the directory of LVM's own locks. All programs that change the same volume group must use the same
// directory: it is the default of lvm(8) in all distributions.
const lockDir = "/run/lock/lvm"

// commandTime is the longest time of a command. It may have to wait for the lock of another program.
const commandTime = 5 * time.Minute

// maxReport is the maximum size of a report in bytes.
const maxReport = 64 << 20

// config is the configuration of every command, instead of the files in /etc/lvm. lvm(8) sees only the given devices
// (never those of logical volumes), creates device nodes itself instead of waiting for udev, and notifies no daemon.
const config = `devices{dir="/dev" scan=["/dev"] obtain_device_list_from_udev=0 external_device_info_source="none" use_devicesfile=0 hints="none" scan_lvs=0 global_filter=[%s"r|.*|"]} ` +
	`global{use_lvmpolld=0 notify_dbus=0 event_activation=0 locking_dir="` + lockDir + `"} ` +
	`activation{udev_sync=0 udev_rules=0 monitoring=0} backup{backup=0 archive=0} report{output_format="json"}`

// configuration returns the configuration for the devices of the group.
func (g Group) configuration() string {
	var filter strings.Builder
	for _, device := range g.Devices {
		fmt.Fprintf(&filter, "%q,", "a|^"+regexp.QuoteMeta(device)+"$|")
	}
	return fmt.Sprintf(config, filter.String())
}

// locks contains a semaphore for each volume group, by UUID. Only one command at a time runs for a group.
var locks sync.Map

// run runs a command of lvm(8) for the group, and returns its standard output. The command continues if ctx ends. If an earlier
// command was killed, run completes what that command has not.
func (g Group) run(ctx context.Context, name string, args ...string) (string, error) {
	lock, _ := locks.LoadOrStore(g.UUID, semaphore.NewWeighted(1))
	if err := trace.Acquire(ctx, lock.(*semaphore.Weighted), "wait for volume group"); err != nil {
		return "", err
	}
	defer lock.(*semaphore.Weighted).Release(1)
	if err := os.MkdirAll(lockDir, 0o700); err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
	defer cancel()
	once := func() (string, error) {
		out, err := g.Command(name, args...).Answer(ctx, maxReport)
		return out, explain(name, args, err)
	}
	out, err := once()
	if !errors.Is(err, errQueued) {
		return out, err
	}
	if removeErr := g.removeQueued(); removeErr != nil {
		return out, errors.Join(err, removeErr)
	}
	return once() // also if nothing was queued: this command may have failed for its own volume, whose removal it has queued
}

// Command returns a command of lvm(8) for the group. The caller must not change the group at the same time.
func (g Group) Command(name string, args ...string) command.Command {
	return command.Command{
		Name: "lvm", Action: name, Args: append([]string{name, "--config", g.configuration()}, args...),
		Env: []string{"LC_ALL=C", "LVM_SYSTEM_DIR=", "DM_DISABLE_UDEV=1", "LVM_SUPPRESS_FD_WARNINGS=1"},
	}
}

// explain returns a short error of a failed command.
func explain(name string, args []string, err error) error {
	var failed *command.Error
	if !errors.As(err, &failed) {
		return err
	}
	output := strings.TrimSpace(backupWarning.ReplaceAllString(failed.Output, ""))
	reason := fmt.Errorf("lvm %s %s: exit status %d: %s", name, strings.Join(args, " "), failed.Code, output)
	for text, known := range map[string]error{
		" in use":                                           ErrInUse,
		"with queued messages":                              errQueued,
		"nsufficient free space":                            ErrNoRoom,
		"nsufficient suitable allocatable":                  ErrNoRoom,
		"Failed to find logical volume":                     ErrMissing,
		"not found in volume group":                         ErrMissing,
		"One or more specified logical volume(s) not found": ErrMissing,
	} {
		if strings.Contains(output, text) {
			return fmt.Errorf("%w: %w", known, reason)
		}
	}
	return reason
}

// backupWarning matches warnings about the metadata backups that config switches off.
var backupWarning = regexp.MustCompile(`(?:; )? *WARNING: (?:Metadata changes will NOT be|This metadata update is NOT) backed up\.?`)

// Version returns the version of lvm(8).
func Version(ctx context.Context) (string, error) {
	out, err := Group{}.run(ctx, "version")
	if err != nil {
		return "", err
	}
	_, version, _ := strings.Cut(out, "LVM version:")
	version, _, _ = strings.Cut(strings.TrimSpace(version), " ")
	return cmp.Or(version, "unknown"), nil
}

// bytesOf formats a size for lvm(8).
func bytesOf(n int64) string { return strconv.FormatInt(n, 10) + "b" }

// Create creates a linear logical volume with a size in bytes, which is a multiple of the extent size, and activates it
// if active is set. No other logical volume ever had the name. The content of the volume is that of its extents. Programs
// that activate all volumes at boot do not activate it.
func (g Group) Create(ctx context.Context, name string, size int64, tags []string, active bool) (VolumeID, error) {
	activate := "n"
	if active {
		activate = "y"
	}
	args := []string{"--yes", "--activate", activate, "--zero", "n", "--wipesignatures", "n", "--setautoactivation", "n", "--type", "linear", "--size", bytesOf(size), "--name", name}
	for _, tag := range tags {
		args = append(args, "--addtag", tag)
	}
	if _, err := g.run(ctx, "lvcreate", append(args, g.Name)...); err != nil {
		return VolumeID{}, err
	}
	return g.created(ctx, name)
}

// created returns the ID of a new logical volume, active or not. It reads the metadata of the group itself, because
// another command takes longer.
func (g Group) created(ctx context.Context, name string) (VolumeID, error) {
	if id, ok := volumeIn(g.metadata(), name); ok {
		return VolumeID{g.UUID, id}, nil
	}
	r, err := g.Report(ctx)
	if err != nil {
		return VolumeID{}, err
	}
	lv, ok := r.Named(name)
	if !ok {
		return VolumeID{}, fmt.Errorf("lvcreate succeeded, but the logical volume %s/%s is missing: %w", g.Name, name, ErrMissing)
	}
	return lv.ID, nil
}

// Activate makes the device of a logical volume usable, with at least a size in bytes. A killed command may have left the
// device suspended, without a table, or with the old size.
func (g Group) Activate(ctx context.Context, name string, id VolumeID, size int64) (sys.MappedDevice, error) {
	d, ok, err := id.Device()
	usable := func() bool { return ok && !d.Suspended && Size(d.Number) >= size }
	if err != nil || usable() {
		return d, err
	}
	args := []string{"--yes", "--ignoremonitoring", "--activate", "y", "--ignoreactivationskip", g.Name + "/" + name}
	if ok {
		args = []string{"--refresh", g.Name + "/" + name}
	}
	if _, err := g.run(ctx, "lvchange", args...); err != nil {
		return d, err
	}
	if d, ok, err = id.Device(); err == nil && !usable() {
		err = fmt.Errorf("lvchange %s did not activate the logical volume %s with %d bytes: %w", strings.Join(args, " "), id.Volume, size, ErrMissing)
	}
	return d, err
}

// busyTime is the time for which Deactivate waits for programs that have the device open for a moment.
const busyTime = time.Second

// Deactivate removes the device of a logical volume. The error is ErrInUse if the device is open or mounted. It is no
// error if the logical volume is not active.
func (g Group) Deactivate(ctx context.Context, name string, id VolumeID) error {
	var active bool
	err := retry.For(ctx, busyTime, func() (bool, error) {
		d, ok, err := id.Device()
		if active = ok; err == nil && ok && d.Opens > 0 {
			err = ErrInUse
		}
		return errors.Is(err, ErrInUse), err
	})
	if err != nil || !active {
		return err
	}
	_, err = g.run(ctx, "lvchange", "--ignoremonitoring", "--activate", "n", g.Name+"/"+name)
	return err
}

// Extend enlarges a logical volume, active or not, to a size in bytes. If ranges are given (Ranges), it gets only their
// extents, and the error is ErrNoRoom if they are not free.
func (g Group) Extend(ctx context.Context, name string, size int64, ranges ...string) error {
	_, err := g.run(ctx, "lvextend", append([]string{"--yes", "--size", bytesOf(size), g.Name + "/" + name}, ranges...)...)
	return err
}

// Ranges returns the ranges of extents of a linear logical volume, each in the form DEVICE:FIRST-LAST.
func (g Group) Ranges(ctx context.Context, name string, id VolumeID) ([]string, error) {
	out, err := g.run(ctx, "lvs", "--select", selecting(id), "--options", "seg_pe_ranges", g.Name+"/"+name)
	if err != nil {
		return nil, err
	}
	return parseRanges(out)
}

// RemoveTag removes a tag of a logical volume. It is no error if the volume does not have the tag. It changes nothing
// if another logical volume has the name.
func (g Group) RemoveTag(ctx context.Context, name string, id VolumeID, tag string) error {
	_, err := g.run(ctx, "lvchange", "--yes", "--select", selecting(id), "--deltag", tag, g.Name+"/"+name)
	return err
}

// TakeOver removes and adds tags of a logical volume, and prevents that programs that activate all volumes at boot
// activate it. That is one change of the group.
func (g Group) TakeOver(ctx context.Context, lv LogicalVolume, remove, add []string) error {
	flag := "--setautoactivation=n"
	if lv.Pool != "" {
		flag = "--setactivationskip=y" // see newVolume
	}
	return g.changeTags(ctx, lv, flag, remove, add)
}

// Release removes tags of a logical volume, and undoes the other change of TakeOver.
func (g Group) Release(ctx context.Context, lv LogicalVolume, tags []string) error {
	flag := "--setautoactivation=y"
	if lv.Pool != "" {
		flag = "--setactivationskip=n"
	}
	return g.changeTags(ctx, lv, flag, tags, nil)
}

// changeTags sets a flag, and removes and adds tags. It changes nothing if another logical volume has the name.
func (g Group) changeTags(ctx context.Context, lv LogicalVolume, flag string, remove, add []string) error {
	args := []string{"--yes", "--select", selecting(lv.ID), flag}
	for _, tag := range remove {
		args = append(args, "--deltag", tag)
	}
	for _, tag := range add {
		args = append(args, "--addtag", tag)
	}
	_, err := g.run(ctx, "lvchange", append(args, g.Name+"/"+lv.Name)...)
	return err
}

// Remove removes a logical volume, active or not. It changes nothing if another logical volume has the name.
func (g Group) Remove(ctx context.Context, name string, id VolumeID) error {
	_, err := g.run(ctx, "lvremove", "--yes", "--select", selecting(id), g.Name+"/"+name)
	return err
}

// selecting returns the selection of one logical volume.
func selecting(id VolumeID) string {
	return fmt.Sprintf(`lv_uuid="%s" && vg_uuid="%s"`, id.Volume, id.Group)
}
