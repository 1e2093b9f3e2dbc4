package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
)

// maxFound is the size of the output of a check program that is kept, in bytes.
const maxFound = 8 << 10

// checkPrograms are the programs that check a filesystem without changing it, by its type.
var checkPrograms = map[string]struct {
	name string
	args []string
	// found reports whether an exit status means that the filesystem has errors.
	found func(code int) bool
}{
	"ext4": {"e2fsck", []string{"-f", "-n"}, func(code int) bool { return code&4 != 0 }}, // e2fsck(8)
	"xfs":  {"xfs_repair", []string{"-n"}, func(code int) bool { return code == 1 }},     // xfs_repair(8)
	// A scrub by the kernel (BTRFS_IOC_SCRUB) would not end when the process is killed, and Linux 6.1 reports all metadata
	// as invalid if a filesystem has a metadata_uuid, as the copy has (Reidentify).
	"btrfs": {"btrfs", []string{"check", "--readonly", "--check-data-csum"}, func(code int) bool { return code == 1 }},
}

// replayOptions are the mount options with which the kernel replays the journal of a filesystem, and does no other work.
var replayOptions = map[string][]string{
	"ext4":  {"errors=remount-ro", "noinit_itable"},
	"btrfs": {"skip_balance"},
}

// CheckCopy checks the filesystem on a copy of a device, which no other process uses, and which CheckCopy changes: without a
// replay of its journal, a filesystem that was in use seems to have errors. It returns the beginning of the output of the check
// program if the filesystem has errors, and otherwise nothing. The program has the idle I/O priority, and runs only when it has its
// turn in the budget. It is killed when ctx ends, and when this process ends. The error is ErrForeign for a btrfs with checksums of another type
// than Format creates.
func CheckCopy(ctx context.Context, device *os.File, fsType string, budget *background.Budget) (found string, err error) {
	switch _, err := ReadSuperblock(device, fsType); {
	case errors.Is(err, ErrNoFS):
		return err.Error(), nil
	case err != nil:
		return "", err
	}
	if fsType == "btrfs" { // the kernel mounts no two filesystems with one UUID
		switch err := Reidentify(ctx, device, fsType); {
		case errors.Is(err, ErrNoFS): // the superblock is damaged
			return err.Error(), nil
		case err != nil:
			return "", err
		}
	}
	replayErr := replay(ctx, device, fsType)
	if replayErr != nil && !mayBeDamaged(replayErr) {
		return "", replayErr
	}
	err = sys.OnOwnThread(func() (err error) {
		sys.IdleIO() // the program inherits the priority
		found, err = runCheck(ctx, device, fsType, budget)
		return err
	})
	switch {
	case err != nil || replayErr == nil:
		return found, err
	case found == "": // the program ignores the journal
		return "", replayErr
	}
	return replayErr.Error() + "\n" + found, nil
}

// replay makes the kernel replay the journal of the filesystem on a device, and remove the files that were deleted while they
// were open.
func replay(ctx context.Context, device *os.File, fsType string) error {
	path := "/proc/self/fd/" + strconv.Itoa(int(device.Fd())) // the device may have no node any more
	fs, err := mount.Filesystem(path, fsType, mount.Options{Data: replayOptions[fsType]})
	if err != nil {
		return fmt.Errorf("replaying the journal: %w", err)
	}
	if err := fs.Close(); err != nil {
		return err
	}
	// A process that another call starts inherits the mount until its program runs.
	return retry.For(ctx, busyTimeout, func() (again bool, err error) {
		f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
		if err == nil {
			f.Close()
		}
		return errors.Is(err, unix.EBUSY), err
	})
}

// mayBeDamaged reports whether the error of a mount can be caused by a damaged filesystem.
func mayBeDamaged(err error) bool {
	for _, damaged := range []error{unix.EUCLEAN, unix.EBADMSG, unix.EINVAL, unix.EIO} {
		if errors.Is(err, damaged) {
			return true
		}
	}
	return false
}

// runCheck runs the check program of a filesystem. It returns the beginning of the output if the filesystem has errors.
func runCheck(ctx context.Context, device *os.File, fsType string, budget *background.Budget) (found string, err error) {
	program := checkPrograms[fsType]
	cmd := command.Command{Name: program.name, Args: append(program.args, inheritedPath), Hold: []*os.File{device}}
	out, err := cmd.Gently(ctx, maxFound, budget.Do)
	var failed *command.Error
	if errors.As(err, &failed) && program.found(failed.Code) {
		return out, nil
	}
	return "", err
}
