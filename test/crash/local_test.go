package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/quota"
)

// checkBound wants exactly one mount of the volume's directory at a path, or none.
func (c *co) checkBound(path string, want, readOnly bool) error {
	mounts, err := mountsAt(path)
	if err != nil {
		return err
	}
	if !want {
		return wantCount("mounts at "+path, make([]string, len(mounts)), 0)
	}
	if len(mounts) != 1 {
		return fmt.Errorf("%d mounts at %s, expected 1", len(mounts), path)
	}
	m := mounts[0]
	if end := "/pool/" + c.place(); m.FSType != c.fsType() || !strings.HasSuffix(m.Root, end) {
		return fmt.Errorf("%s has %s of %s, expected is …%s of %s", path, m.Root, m.FSType, end, c.fsType())
	}
	if ro := strings.HasPrefix(m.Options, "ro"); ro != readOnly {
		return fmt.Errorf("%s is mounted %s, expected is read-only %t", path, m.Options, readOnly)
	}
	return nil
}

// place is where the volume's directory lies in its pool.
func (c *co) place() string {
	if sub := c.class["subDir"]; sub != "" {
		return sub
	}
	return "volumes/" + c.name + "/data"
}

// checkLimit wants the filesystem to keep a volume to the size that the driver has
// promised.
func (c *co) checkLimit() error {
	if !c.created || c.kind == plain {
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
		// A call that was killed when it had raised the limit leaves it so until the
		// volume is staged anew; snapshots raise it until they are removed.
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
			err = fmt.Errorf("the directory counts on ID %d, the record has %d", id, record.Directory.Quota.ID)
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

// limitsNothing wants all limits given back, and nothing left among others' directories.
func (h *host) limitsNothing() error {
	if _, err := os.Lstat(filepath.Join(h.pool, nested["subDir"])); err == nil {
		return fmt.Errorf("%s is left", nested["subDir"])
	}
	groups, err := filepath.Glob("/sys/fs/btrfs/*/qgroups/1_*")
	if err != nil {
		return err
	}
	for _, g := range groups {
		if h.ownGroup(g) {
			return fmt.Errorf("%s is left", g)
		}
	}
	return nil
}

// ownGroup tells whether a qgroup in sysfs is of the pool's filesystem, by its device.
func (h *host) ownGroup(group string) bool {
	mounts, err := mountsAt(filepath.Dir(h.pool))
	if err != nil || len(mounts) == 0 {
		return false
	}
	_, err = os.Lstat(filepath.Join(group, "../../devices", filepath.Base(mounts[0].Source)))
	return err == nil
}
