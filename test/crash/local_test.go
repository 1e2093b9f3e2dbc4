package crash

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/linux/quota"
)

// checkBound fails unless a path has exactly one mount of the volume's directory, or none.
func (c *co) checkBound(path string, want, readOnly bool) error {
	m, err := mountAt(path, want)
	if m == nil {
		return err
	}
	own, err := c.host.filesystem()
	if err != nil {
		return err
	}
	if end := "/pool/" + c.place(); m.Source != own.Source || !strings.HasSuffix(m.Root, end) {
		return fmt.Errorf("%s has %s of %s, expected is …%s of %s", path, m.Root, m.Source, end, own.Source)
	}
	return checkReadOnly(m, readOnly)
}

// filesystem is the mount of the pool's filesystem.
func (h *host) filesystem() (*mountinfo.Info, error) { return mountAt(filepath.Dir(h.pool), true) }

// place is the path of the volume's directory in its pool.
func (c *co) place() string {
	if sub := c.class["subDir"]; sub != "" {
		return sub
	}
	return "volumes/" + c.name + "/data"
}

// checkLimit fails unless the filesystem limits a volume to the promised size.
func (c *co) checkLimit() error {
	if !c.created || !c.kind.Has(backendtest.Limited) {
		return nil
	}
	promised, err := c.capacity()
	if err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(c.host.pool, "volumes", c.name, "volume.json"))
	if err != nil {
		return err
	}
	var record struct {
		Directory struct{ Quota struct{ ID uint64 } }
	}
	if err := json.Unmarshal(b, &record); err != nil {
		return err
	}
	return c.host.withQuota(func(fs *quota.FS) error {
		u, err := fs.Usage(record.Directory.Quota.ID)
		// A call that was killed after it raised the limit leaves the limit so until the
		// volume is staged again. Snapshots raise it until they are removed.
		if short := u.Limit.Bytes < promised; err == nil && (short || u.Limit.Bytes > promised && c.follows && !c.cutBefore) {
			err = fmt.Errorf("the limit is %d bytes, the driver promised %d", u.Limit.Bytes, promised)
		}
		dir, oerr := os.Open(filepath.Join(c.host.pool, c.place()))
		if err = errors.Join(err, oerr); err != nil {
			return err
		}
		defer dir.Close()
		id, err := fs.ID(dir)
		if err == nil && id != record.Directory.Quota.ID {
			err = fmt.Errorf("the directory has quota ID %d, the record has %d", id, record.Directory.Quota.ID)
		}
		return err
	})
}

func (h *host) withQuota(f func(*quota.FS) error) error {
	dir, err := os.Open(h.pool)
	if err != nil {
		return err
	}
	defer dir.Close()
	fs, err := quota.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f(fs), fs.Close())
}

// limitsNothing fails if a limit is left, or a directory of a subDir.
func (h *host) limitsNothing() error {
	if _, err := os.Lstat(filepath.Join(h.pool, nested["subDir"])); err == nil {
		return fmt.Errorf("%s still exists", nested["subDir"])
	}
	own, err := h.filesystem()
	if err != nil {
		return err
	}
	if own.FSType == "btrfs" {
		return noGroups(own.Source)
	}
	return noProjects(filepath.Dir(h.pool))
}

// noGroups fails if the btrfs on a device has a qgroup of a volume.
func noGroups(device string) error {
	groups, err := filepath.Glob("/sys/fs/btrfs/*/qgroups/1_*")
	for _, g := range groups {
		if _, lerr := os.Lstat(filepath.Join(g, "../../devices", filepath.Base(device))); lerr == nil {
			err = errors.Join(err, fmt.Errorf("%s is left", g))
		}
	}
	return err
}

// noProjects fails if a project of the filesystem at a path has a limit or files. All other
// files have project 0.
func noProjects(path string) error {
	out, err := exec.Command("xfs_quota", "-f", "-x", "-c", "report -p -n -N -b -i", path).CombinedOutput()
	if err != nil || !bytes.HasPrefix(out, []byte("#0 ")) {
		return fmt.Errorf("xfs_quota of %s: %w\n%s", path, err, out)
	}
	for line := range strings.Lines(string(out)) {
		if id, has, _ := strings.Cut(line, " "); id != "#0" && strings.ContainsAny(has, "123456789") {
			err = errors.Join(err, fmt.Errorf("project %s is left: %s", id, has))
		}
	}
	return err
}
