package luks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/sys"
)

// Program is the name of cryptsetup(8), and Package that of its package in Debian.
const (
	Program = "cryptsetup"
	Package = "cryptsetup-bin"
)

// The settings of new containers.
const (
	Cipher  = "aes-xts-plain64"
	KeyBits = 512 // two keys of 256 bits
	// Derivation is the function that derives the key of a keyslot from a passphrase, with its memory in KiB, its
	// iterations, and one thread.
	Derivation       = "argon2id"
	DerivationMemory = 32 << 10
	DerivationTime   = 4
)

// MaxKey is the largest size of a passphrase in bytes. It fits a pipe that no process reads yet.
const MaxKey = 4096

// Errors of containers.
var (
	// ErrWrongKey means that the passphrase opens no keyslot.
	ErrWrongKey = errors.New("the passphrase does not open the container")
	// ErrBusy means that a process has the device of an open container open, or that it is mounted.
	ErrBusy = errors.New("the device of the container is in use")
	// ErrNoCrypt means that the kernel has no encryption of devices.
	ErrNoCrypt = errors.New("the kernel cannot encrypt devices: load the module dm_crypt (modprobe dm_crypt)")
)

// derivations limits the key derivations that run at the same time, because each takes DerivationMemory.
var derivations = semaphore.NewWeighted(1)

// commandTime is the longest time of a command.
const commandTime = 5 * time.Minute

// run runs an action of cryptsetup(8) with passphrases, which it reads from the files /dev/fd/3 and so on. The command continues if ctx
// ends. The caller erases the passphrases.
func run(ctx context.Context, action string, keys [][]byte, args ...string) error {
	c := command.Command{
		Name: Program, Action: action, Args: append([]string{"--batch-mode", "--disable-locks", action}, args...),
		Env: []string{"DM_DISABLE_UDEV=1"}, // cryptsetup(8) does not wait for udev, which may not run
	}
	for _, key := range keys {
		pipe, err := pipeOf(key)
		if err != nil {
			return err
		}
		defer pipe.Close()
		c.Hold = append(c.Hold, pipe)
	}
	if err := trace.Acquire(ctx, derivations, "wait for cryptsetup"); err != nil {
		return err
	}
	defer derivations.Release(1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commandTime)
	defer cancel()
	err := c.Run(ctx)
	var failed *command.Error
	const wrongKey = 2 // cryptsetup(8), return codes
	switch {
	case errors.As(err, &failed) && failed.Code == wrongKey:
		return ErrWrongKey
	case failed != nil && strings.Contains(failed.Output, "kernel supports"): // "Check that kernel supports … cipher"
		return fmt.Errorf("%w: %w", ErrNoCrypt, err)
	}
	return err
}

// The names of the first and the second file that a program inherits.
const (
	firstKey  = "/dev/fd/3"
	secondKey = "/dev/fd/4"
)

// pipeOf returns a pipe that contains a passphrase.
func pipeOf(key []byte) (*os.File, error) {
	if len(key) == 0 || len(key) > MaxKey {
		return nil, fmt.Errorf("a passphrase has 1 to %d bytes, not %d", MaxKey, len(key))
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	_, err = w.Write(key)
	if err = errors.Join(err, w.Close()); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// Version returns the version of cryptsetup(8). It fails if this process cannot use the device mapper.
func Version(ctx context.Context) (string, error) {
	out, err := command.Command{Name: Program, Args: []string{"--version"}}.Output(ctx)
	if err != nil {
		return "", err
	}
	words := strings.Fields(out)
	return words[min(1, len(words)-1)], dm.CheckControl()
}

// Format creates a container on a device, which must have no data, and makes it durable. An interrupted call leaves an
// incomplete container.
func Format(ctx context.Context, device *os.File, sectorSize int, key []byte) error {
	err := run(ctx, "luksFormat", [][]byte{key}, append(derivationArgs(),
		"--type", "luks2", "--cipher", Cipher, "--key-size", strconv.Itoa(KeyBits), "--hash", "sha256",
		"--sector-size", strconv.Itoa(sectorSize), "--offset", strconv.Itoa(DataOffset/512), "--key-file", firstKey, device.Name())...)
	if err != nil {
		return err
	}
	return device.Sync()
}

func derivationArgs() []string {
	return []string{
		"--pbkdf", Derivation, "--pbkdf-memory", strconv.Itoa(DerivationMemory),
		"--pbkdf-force-iterations", strconv.Itoa(DerivationTime), "--pbkdf-parallel", "1",
	}
}

// Open opens the container on a device, and returns the open device of its data. Its node is that of Path(name). The
// caller has checked the header. The container stays open until Close, or until the device is closed after CloseLater.
func Open(ctx context.Context, device *os.File, name string, key []byte) (*os.File, error) {
	err := run(ctx, "open", [][]byte{key}, "--type", "luks2", "--key-file", firstKey, device.Name(), name)
	if err != nil {
		return nil, err
	}
	ok, err := Find(name)
	if err == nil && !ok {
		err = fmt.Errorf("%s was closed by another program", name)
	}
	if err != nil {
		return nil, err
	}
	return os.OpenFile(Path(name), os.O_RDWR, 0)
}

// Path returns the path of the device node of an open container.
func Path(name string) string { return blockdev.NodePath(name) }

// Find reports whether a container with a name is open, and creates its device node.
func Find(name string) (ok bool, err error) {
	d, ok, err := find(name)
	if err != nil || !ok || dm.Size(d.Number) == 0 { // a command was killed before the device had a table
		return false, err
	}
	if node := filepath.Join("/dev/mapper", name); isNode(node) { // of cryptsetup; nothing would remove it
		_ = os.Remove(node)
	}
	return true, blockdev.MakeNode(name, d.Number)
}

// find returns the mapped device of a container, also if it has no table.
func find(name string) (d sys.MappedDevice, ok bool, err error) {
	d, ok, err = dm.Named(name)
	if ok && (!strings.HasPrefix(d.UUID, "CRYPT-LUKS2-") || !strings.HasSuffix(d.UUID, "-"+name)) {
		return d, false, fmt.Errorf("the mapped device %s has the UUID %q, so it is not of a LUKS2 container: remove it (dmsetup remove)", name, d.UUID)
	}
	return d, ok, err
}

// isNode reports whether a path is a device node itself, and not a link of udev.
func isNode(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeDevice != 0
}

// CloseLater makes the kernel close a container as soon as its device is not open or mounted any more.
func CloseLater(name string) error { return dm.Remove(name, true) }

// busyTime is the time to wait until other processes close a device, for example udev.
const busyTime = time.Second

// Close closes a container, and removes its device node. It is no error if no container with the name is open. The error
// is ErrBusy if its device is in use for over a second.
func Close(ctx context.Context, name string) error {
	err := retry.For(ctx, busyTime, func() (again bool, err error) {
		if _, ok, err := find(name); err != nil || !ok {
			return false, err
		}
		err = dm.Remove(name, false)
		return errors.Is(err, dm.ErrInUse), err
	})
	if errors.Is(err, dm.ErrInUse) {
		return fmt.Errorf("%s: %w: a process has it open, or has it mounted in its own mount namespace (lsblk)", name, ErrBusy)
	}
	if err != nil {
		return err
	}
	return blockdev.RemoveNode(name)
}

// CloseLeftovers removes the devices on the device with a path that a killed cryptsetup(8) has left: it maps keyslots if the kernel has no
// ciphers for programs.
func CloseLeftovers(path string) error {
	kernelName, err := blockdev.KernelName(path)
	if err != nil {
		return err
	}
	names, err := filepath.Glob("/sys/class/block/" + kernelName + "/holders/*/dm/name")
	if err != nil {
		return err
	}
	for _, file := range names {
		b, err := os.ReadFile(file)
		if name := strings.TrimSpace(string(b)); err == nil && strings.HasPrefix(name, "temporary-cryptsetup-") {
			if err := dm.Remove(name, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// Resize makes the device of an open container as large as the device below it.
func Resize(ctx context.Context, name string, key []byte) error {
	// cryptsetup(8) finds a container by its node in /dev/mapper.
	d, ok, err := find(name)
	if err != nil || !ok {
		return errors.Join(err, fmt.Errorf("resizing %s: it is not open", name))
	}
	node := filepath.Join("/dev/mapper", name)
	if err := unix.Mknod(node, unix.S_IFBLK|0o600, int(d.Number)); err == nil {
		defer func() { _ = os.Remove(node) }()
	} else if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("mknod %s: %w", node, err)
	}
	return run(ctx, "resize", [][]byte{key}, "--key-file", firstKey, name)
}

// ChangeKey replaces the passphrase of the keyslot that the old one opens. The header is durable when it returns.
func ChangeKey(ctx context.Context, device *os.File, old, key []byte) error {
	args := append(derivationArgs(), "--key-file", firstKey, device.Name(), secondKey)
	if err := run(ctx, "luksChangeKey", [][]byte{old, key}, args...); err != nil {
		return err
	}
	return device.Sync()
}

// Erase durably overwrites the header and the keyslots of a container, whose data cannot be read any more. It writes only
// where a file has data, so that a file on a full filesystem can be erased, and does not write again what reads as zeros.
func Erase(device *os.File) error {
	size, err := blockdev.Size(device)
	if err != nil {
		return err
	}
	zeros, data := make([]byte, 1<<20), make([]byte, 1<<20)
	for at, end := int64(0), min(size, DataOffset); at < end; {
		start, stop, err := sys.NextData(device, at, end)
		if err != nil {
			return err
		}
		for at = start; at < stop; at += int64(len(zeros)) {
			blank := zeros[:min(int64(len(zeros)), stop-at)]
			if n, err := device.ReadAt(data[:len(blank)], at); err == nil && bytes.Equal(data[:n], blank) {
				continue
			}
			if _, err := device.WriteAt(blank, at); err != nil {
				return fmt.Errorf("erasing the LUKS2 header of %s: %w", device.Name(), err)
			}
		}
		at = stop
	}
	return device.Sync()
}
