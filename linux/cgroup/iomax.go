package cgroup

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Limits limit the I/O on a device, per second. 0 means no limit.
type Limits struct{ ReadBytes, WriteBytes, ReadIOPS, WriteIOPS uint64 }

// ioMax is the file in a cgroup that contains the limits of devices.
const ioMax = "io.max"

// unlimited is the value in io.max for no limit.
const unlimited = "max"

// line returns the limits of a device in the format of io.max.
func (l Limits) line(device string) string {
	value := func(n uint64) string {
		if n == 0 {
			return unlimited
		}
		return strconv.FormatUint(n, 10)
	}
	return fmt.Sprintf("%s rbps=%s wbps=%s riops=%s wiops=%s", device, value(l.ReadBytes), value(l.WriteBytes), value(l.ReadIOPS), value(l.WriteIOPS))
}

// parse reads the limits after the device in a line of io.max.
func (l *Limits) parse(fields []string) error {
	for _, f := range fields {
		key, value, _ := strings.Cut(f, "=")
		into, ok := map[string]*uint64{"rbps": &l.ReadBytes, "wbps": &l.WriteBytes, "riops": &l.ReadIOPS, "wiops": &l.WriteIOPS}[key]
		if !ok || value == unlimited {
			continue
		}
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			return fmt.Errorf("io.max contains %q: %w", f, err)
		}
		*into = n
	}
	return nil
}

// Pod is the directory of the cgroup of a pod.
type Pod string

// Limit sets the limits of the pod's I/O on a device, which is not a partition. The device must exist, also to remove limits:
// the limits remain when it is unbound, and apply to its next use. ErrNotExist if the cgroup does not exist.
func (p Pod) Limit(device uint64, limits Limits) error {
	name := fmt.Sprintf("%d:%d", unix.Major(device), unix.Minor(device))
	path := filepath.Join(string(p), ioMax)
	b, err := os.ReadFile(path)
	if err != nil {
		return p.explain(err)
	}
	current, err := limitsIn(string(b), name)
	if err != nil || current == limits {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
	if err != nil {
		return p.explain(err)
	}
	_, err = f.WriteString(limits.line(name))
	return p.explain(cmp.Or(err, f.Close()))
}

// limitsIn returns the limits of a device in the content of io.max.
func limitsIn(content, device string) (limits Limits, err error) {
	for line := range strings.Lines(content) {
		fields := strings.Fields(line)
		if len(fields) > 0 && fields[0] == device {
			return limits, limits.parse(fields[1:])
		}
	}
	return limits, nil
}

// explain adds the reason to an error of the file io.max. The cgroup may have been removed while the file was open.
func (p Pod) explain(err error) error {
	if err == nil {
		return nil
	}
	_, statErr := os.Stat(string(p))
	switch {
	case errors.Is(statErr, fs.ErrNotExist):
		return statErr
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %s has no %s: the controller io is not enabled in cgroup.subtree_control of the parent", ErrUnsupported, p, ioMax)
	}
	return err
}
