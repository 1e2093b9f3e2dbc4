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

// checkBound fails unless a path has exactly one mount, of the volume's directory, or no mount if
// mounted is false.
func (c *co) checkBound(path string, mounted, readOnly bool) error {
	m, err := mountAt(path, mounted)
	if m == nil {
		return err
	}
	poolMount, err := c.host.filesystem()
	if err != nil {
		return err
	}
	if end := "/pool/" + c.dataPath(); m.Source != poolMount.Source || !strings.HasSuffix(m.Root, end) {
		return fmt.Errorf("got %s of %s mounted at %s, want …%s of %s", m.Root, m.Source, path, end, poolMount.Source)
	}
	return checkReadOnly(m, readOnly)
}

// filesystem returns the mount of the pool's filesystem.
func (h *host) filesystem() (*mountinfo.Info, error) { return mountAt(filepath.Dir(h.pool), true) }

// dataPath returns the path of the volume's directory in its pool.
func (c *co) dataPath() string {
	if sub := c.class["subDir"]; sub != "" {
		return sub
	}
	return "volumes/" + c.name + "/data"
}

// checkLimit fails unless a quota limits the volume to the recorded size.
func (c *co) checkLimit() error {
	if !c.created || !c.kind.Has(backendtest.Limited) {
		return nil
	}
	recorded, err := c.capacity()
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
		// The limit may be too large after a crash, until the volume is staged again, and while the
		// volume has snapshots, or had some that are not removed yet.
		if short := u.Limit.Bytes < recorded; err == nil && (short || u.Limit.Bytes > recorded && c.resized && !c.hadSnapshot) {
			err = fmt.Errorf("got a quota of %d bytes, want the recorded size of %d", u.Limit.Bytes, recorded)
		}
		dir, oerr := os.Open(filepath.Join(c.host.pool, c.dataPath()))
		if err = errors.Join(err, oerr); err != nil {
			return err
		}
		defer dir.Close()
		id, err := fs.ID(dir)
		if err == nil && id != record.Directory.Quota.ID {
			err = fmt.Errorf("got quota ID %d of the directory, want %d as in the record", id, record.Directory.Quota.ID)
		}
		return err
	})
}

// withQuota calls f with the quotas of the pool's filesystem.
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

// wantNoLimits fails if the quota of a volume or the directory of inSubDir is left.
func (h *host) wantNoLimits() error {
	if _, err := os.Lstat(filepath.Join(h.pool, inSubDir["subDir"])); err == nil {
		return fmt.Errorf("%s still exists", inSubDir["subDir"])
	}
	poolMount, err := h.filesystem()
	if err != nil {
		return err
	}
	if poolMount.FSType == "btrfs" {
		return wantNoQgroups(poolMount.Source)
	}
	return wantNoProjects(filepath.Dir(h.pool))
}

// wantNoQgroups fails if the btrfs on a device has a qgroup of a volume.
func wantNoQgroups(device string) error {
	groups, err := filepath.Glob("/sys/fs/btrfs/*/qgroups/1_*")
	for _, g := range groups {
		if _, lerr := os.Lstat(filepath.Join(g, "../../devices", filepath.Base(device))); lerr == nil {
			err = errors.Join(err, fmt.Errorf("the qgroup %s is left", g))
		}
	}
	return err
}

// wantNoProjects fails if the filesystem at a path has a project with a limit or files. Files that are
// not limited have project 0.
func wantNoProjects(path string) error {
	out, err := exec.Command("xfs_quota", "-f", "-x", "-c", "report -p -n -N -b -i", path).CombinedOutput()
	if err != nil || !bytes.HasPrefix(out, []byte("#0 ")) {
		return fmt.Errorf("xfs_quota of %s: %w\n%s", path, err, out)
	}
	for line := range strings.Lines(string(out)) {
		if id, has, _ := strings.Cut(line, " "); id != "#0" && strings.ContainsAny(has, "123456789") {
			err = errors.Join(err, fmt.Errorf("project %s is left, with usage and limits %s", id, has))
		}
	}
	return err
}
