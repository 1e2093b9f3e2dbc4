package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/trace"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// minSize is the smallest size in bytes for each filesystem. mkfs.xfs and BTRFS_IOC_RESIZE refuse smaller
// sizes, and ext4 needs 16 MiB for a journal of 4 MiB.
var minSize = map[string]int64{"ext4": 16 * mib, "xfs": 300 * mib, "btrfs": 256 * mib}

// MinSize returns the smallest size in bytes that Format accepts for a filesystem. It is 0 for an
// unsupported type.
func MinSize(fsType string) int64 { return minSize[fsType] }

// mkfsOptions are the options that CheckOptions accepts, by filesystem, each with the pattern of its value. No
// option is accepted that sets another device, a file, a size or the block size.
var mkfsOptions = map[string]map[string]*regexp.Regexp{
	"ext4": {
		"-i": regexp.MustCompile(`^[0-9]{4,9}$`),      // bytes per inode
		"-N": regexp.MustCompile(`^[0-9]{1,10}$`),     // number of inodes
		"-m": regexp.MustCompile(`^[0-9](\.[0-9])?$`), // reserved blocks, percent
	},
	"xfs": {
		"-i": regexp.MustCompile(`^(size=(256|512|1024|2048)|maxpct=[0-9]{1,2})$`),
		"-m": regexp.MustCompile(`^(bigtime|finobt|inobtcount|reflink|rmapbt)=[01]$`),
	},
	"btrfs": {
		"-d": regexp.MustCompile(`^(single|dup)$`),
		"-m": regexp.MustCompile(`^(single|dup)$`),
		"-n": regexp.MustCompile(`^(4096|8192|16384|32768|65536)$`),
	},
}

// CheckOptions verifies options of mkfs for a filesystem of size bytes.
func CheckOptions(fsType string, words []string, size int64) error {
	if len(words)%2 != 0 {
		return fmt.Errorf("%q: each option needs a value", words)
	}
	for pair := range slices.Chunk(words, 2) {
		value := mkfsOptions[fsType][pair[0]]
		if value == nil || !value.MatchString(pair[1]) {
			return fmt.Errorf("option %q is not allowed for filesystem %q (see docs/reference/parameters.md)", pair[0]+" "+pair[1], fsType)
		}
		if err := checkFit(fsType, pair[0], pair[1], size); err != nil {
			return fmt.Errorf("%q: %w", pair[0]+" "+pair[1], err)
		}
	}
	return nil
}

// checkFit refuses options that mkfs would refuse for a device of size bytes, so that creating the volume fails
// and not only staging it.
func checkFit(fsType, option, value string, size int64) error {
	const inodeSize, minPerInode, maxPerInode, minDup = 256, 1024, 64 * mib, 512 * mib
	switch fsType + " " + option {
	case "ext4 -i":
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < minPerInode || n > maxPerInode {
			return fmt.Errorf("must be %d to %d bytes per inode", minPerInode, maxPerInode)
		}
	case "ext4 -N": // at most a quarter of the device for inodes
		if n, err := strconv.ParseInt(value, 10, 64); err != nil || n < 16 || n > size/(4*inodeSize) {
			return fmt.Errorf("must be 16 to %d inodes for %d bytes", size/(4*inodeSize), size)
		}
	case "btrfs -d", "btrfs -m", "btrfs -n":
		if size < minDup {
			return fmt.Errorf("needs a volume of at least %d bytes", minDup)
		}
	}
	return nil
}

// Formatter creates filesystems on images.
type Formatter struct {
	making    singleflight.Group // calls of makeTemplate, by the key in templates
	templates *templateCache
	// turns are held while makeTemplate has a file in memory, by the type of filesystem: if mkfs of one type hangs, the
	// templates of the others are still made.
	turns map[string]*semaphore.Weighted
}

// NewFormatter returns a formatter with an empty template cache.
func NewFormatter() *Formatter {
	f := &Formatter{templates: newTemplateCache(), turns: map[string]*semaphore.Weighted{}}
	for fsType := range layouts {
		f.turns[fsType] = semaphore.NewWeighted(1)
	}
	return f
}

// FormatSpec describes the filesystem to create.
type FormatSpec struct {
	FSType     string
	SectorSize int      // logical block size in bytes of the device
	Options    []string // options of mkfs (CheckOptions)
	// Stale means that a device without signatures (RequireNoSignature) may contain old data
	// elsewhere, such as a disk that was used before.
	Stale bool
	// KeepAllocated means that the blocks of an image stay allocated when it is wiped.
	KeepAllocated bool
}

// Format creates a filesystem on an image, which must be blank, and which no other process may have open for
// writing. The filesystem is not durable until the image is synced. A call that fails or is interrupted leaves
// an incomplete filesystem, which the caller must wipe before the next call.
func (f *Formatter) Format(ctx context.Context, image *os.File, spec FormatSpec) (err error) {
	ctx, span := trace.Start(ctx, "format")
	span.Set("trivet.filesystem", spec.FSType)
	defer span.End(&err)
	size, err := Size(image)
	if err != nil {
		return err
	}
	if t := f.template(ctx, size, spec); t != nil {
		return t.write(image, crashpoint.StageHalfFormat)
	}
	crashpoint.Here(crashpoint.StageHalfFormat)
	return runMkfs(ctx, image, size, spec)
}

// FormatNew creates a filesystem on an image that was just created, and that no other process knows, if there is a template of
// it. Otherwise it reports false, and does not change the image. The filesystem is not durable until the image is synced. After
// an error, the caller must remove the image.
func (f *Formatter) FormatNew(ctx context.Context, image *os.File, spec FormatSpec) (formatted bool, err error) {
	ctx, span := trace.Start(ctx, "format")
	span.Set("trivet.filesystem", spec.FSType)
	defer span.End(&err)
	size, err := Size(image)
	if err != nil {
		return false, err
	}
	t := f.template(ctx, size, spec)
	if t == nil {
		return false, nil
	}
	return true, t.write(image, crashpoint.CreateHalfFormat)
}

// runMkfs creates a filesystem on an image of size bytes with mkfs.
func runMkfs(ctx context.Context, image *os.File, size int64, spec FormatSpec) error {
	cmd, err := mkfs(image, size, spec)
	if err != nil {
		return err
	}
	return retry.For(ctx, mkfsRetryTime, func() (again bool, err error) {
		err = cmd.Run(ctx)
		return otherDeviceLost(err), err
	})
}

// mkfsRetryTime is the time for which runMkfs retries mkfs after otherDeviceLost.
const mkfsRetryTime = 2 * time.Second

// otherDeviceLost reports whether mkfs.btrfs failed because of another loop device, before its first write.
// mkfs.btrfs reads the backing file of every device in the mount table, and fails if one of them is unmounted
// and detached at the same time.
func otherDeviceLost(err error) bool {
	var failed *command.Error
	return errors.As(err, &failed) && failed.Name == "mkfs.btrfs" &&
		strings.Contains(failed.Output, "cannot check mount status")
}

// inheritedPath is the path of the first file that a program inherits.
const inheritedPath = "/proc/self/fd/3"

// mkfs returns the command that creates a filesystem on an image of size bytes.
func mkfs(image *os.File, size int64, spec FormatSpec) (command.Command, error) {
	cmd := command.Command{Name: "mkfs." + spec.FSType, Hold: []*os.File{image}}
	switch spec.FSType {
	case "ext4":
		cmd.Args = ext4Args(size, spec.Stale, spec.Options)
		cmd.Env = []string{"MKE2FS_CONFIG=/dev/null"}
	case "xfs":
		cmd.Args = append([]string{"-q", "-K", "-b", "size=4096", "-s", "size=" + strconv.Itoa(spec.SectorSize)}, spec.Options...)
	case "btrfs":
		cmd.Args = append([]string{"-q", "-K", "-s", "4096"}, spec.Options...)
	default:
		return cmd, fmt.Errorf("formatting as %q: %w", spec.FSType, ErrNoFS)
	}
	cmd.Args = append(cmd.Args, inheritedPath)
	return cmd, nil
}

// ext4Args returns arguments of mke2fs that set all parameters, so that no mke2fs.conf changes the result: blocks of
// 4 KiB for every size, a journal that is large enough after growth, a separate checksum seed so that the UUID can
// change, and no zeroing, because a new image reads as zeros. On stale devices the kernel zeroes the inode tables
// after the mount, and mke2fs zeroes the journal.
func ext4Args(size int64, stale bool, options []string) []string {
	extended := "nodiscard,lazy_itable_init=1,lazy_journal_init=1,assume_storage_prezeroed=1"
	if stale {
		extended = "nodiscard,lazy_itable_init=1,lazy_journal_init=0"
	}
	args := []string{
		"-q", "-F", "-t", "ext4", "-b", "4096", "-I", "256", "-i", "16384", "-m", "0",
		"-O", "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,dir_nlink,extra_isize,metadata_csum,metadata_csum_seed",
		"-E", extended,
		"-J", "size=" + strconv.FormatInt(journalSize(size)/mib, 10),
	}
	return append(args, options...)
}

// journalSize returns the size of an ext4 journal in bytes. The size is the default of mke2fs for large filesystems,
// and larger for small ones, which may grow.
func journalSize(size int64) int64 {
	switch {
	case size < 128*mib:
		return 4 * mib
	case size < 2*gib:
		return 32 * mib
	case size < 32*gib:
		return 64 * mib
	default:
		return 128 * mib
	}
}

// Resize sets the size of an image in bytes. If allocate is set, it allocates all blocks (fallocate(2)).
// The error is syscall.EFBIG if the size is too large for the filesystem, and syscall.EOPNOTSUPP if the filesystem
// cannot allocate.
func Resize(image *os.File, size int64, allocate bool) error {
	if allocate {
		return unix.Fallocate(int(image.Fd()), 0, 0, size)
	}
	return image.Truncate(size)
}

// WipeImage makes an image blank. Its blocks stay allocated if keepAllocated is set. If the filesystem cannot
// punch holes (NFS before 4.2), WipeImage truncates the image and extends it again, so an interrupted call can
// leave a shorter image.
func WipeImage(image *os.File, keepAllocated bool) error {
	size, err := Size(image)
	if err != nil {
		return err
	}
	mode := uint32(unix.FALLOC_FL_PUNCH_HOLE)
	if keepAllocated {
		mode = unix.FALLOC_FL_ZERO_RANGE
	}
	err = unix.Fallocate(int(image.Fd()), mode|unix.FALLOC_FL_KEEP_SIZE, 0, size)
	if errors.Is(err, unix.EOPNOTSUPP) {
		if err = image.Truncate(0); err == nil {
			err = Resize(image, size, keepAllocated)
		}
	}
	if err != nil {
		return fmt.Errorf("wiping %s: %w", image.Name(), err)
	}
	return nil
}

// ErrUnclean means that the filesystem has errors that an automatic check must not repair.
var ErrUnclean = errors.New("filesystem has errors that cannot be repaired automatically")

// Check makes the safe repairs of a filesystem that was not cleanly unmounted. The image must be locked, and
// must not be attached to a device. If the filesystem is clean, Check reads only the superblock. xfs and btrfs
// recover when they are mounted.
func Check(ctx context.Context, image *os.File, fsType string) error {
	sb, err := ReadSuperblock(image, fsType)
	if err != nil || !sb.Dirty {
		return err
	}
	return preen(ctx, image)
}

// preen replays the journal of an ext4, and makes the safe repairs if the filesystem is marked unclean.
func preen(ctx context.Context, image *os.File) error {
	err := command.Command{Name: "e2fsck", Args: []string{"-p", inheritedPath}, Hold: []*os.File{image}}.Run(ctx)
	var failed *command.Error
	const corrected = 1 // e2fsck(8), exit codes
	if errors.As(err, &failed) && failed.Code == corrected {
		return nil
	}
	if errors.As(err, &failed) {
		return fmt.Errorf("%w: %w", ErrUnclean, err)
	}
	return err
}
