package emptydir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// noLimit takes the place of a limit that the manifest has no more, in bytes.
const noLimit = 1 << 60

// setUpDisk makes the directory if it has no record: before that no pod was given it.
func (m *mounter) setUpDisk(ctx context.Context, made *record, args plugins.MounterArgs) error {
	if err := m.makeAbove(); err != nil {
		return err
	}
	_, err := os.Lstat(m.path)
	switch {
	case err == nil && made != nil:
		return m.relimit(made)
	case err == nil:
		err = m.removeHalf(ctx)
	case errors.Is(err, fs.ErrNotExist):
		err = m.p.forget(m.key)
	}
	if err != nil {
		return err
	}
	m.p.sweep()
	return m.make(ctx, args)
}

// removeHalf removes what a call made that was cut off: it is empty. Else it is not ours.
func (m *mounter) removeHalf(ctx context.Context) error {
	entries, err := os.ReadDir(m.path)
	if err != nil {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("%s is not empty, and no record says that it is the pod's: move it away", m.path)
	}
	return m.removeDisk(ctx)
}

// make makes the directory, its record last.
func (m *mounter) make(ctx context.Context, args plugins.MounterArgs) error {
	made := &record{}
	err := m.p.withQuota(func(fs *quota.FS) error {
		above, err := os.Open(filepath.Dir(m.path))
		if err != nil {
			return err
		}
		defer above.Close()
		if err := fs.MakeDir(above, filepath.Base(m.path)); err != nil {
			return err
		}
		if m.size == 0 {
			return nil
		}
		made, err = m.allocate(fs)
		return err
	})
	if err != nil {
		return err
	}
	if err := os.Chmod(m.path, mode); err != nil {
		return err
	}
	if err := ownership.Set(ctx, m.path, args); err != nil {
		return err
	}
	return m.p.save(m.key, made)
}

// allocate limits the directory, if the filesystem can do that.
func (m *mounter) allocate(fs *quota.FS) (*record, error) {
	if fs.Kind() == quota.None {
		m.warn(fs.Why())
		return &record{}, nil
	}
	m.p.recording.Lock()
	defer m.p.recording.Unlock()
	taken, err := m.p.ids()
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(m.path)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	id, err := fs.Allocate(dir, quota.Limit{Bytes: m.size}, func(id uint64) bool { return taken[id] })
	if err != nil {
		return nil, fmt.Errorf("sizeLimit %s: %w", m.limit, err)
	}
	return &record{Kind: fs.Kind(), ID: id, Bytes: m.size}, nil
}

func (m *mounter) warn(why string) {
	m.warnings = append(m.warnings, fmt.Sprintf("emptyDir.sizeLimit %s is not enforced: %s", m.limit, why))
}

// relimit has the limit of a directory follow the manifest.
func (m *mounter) relimit(made *record) error {
	if made.ID == 0 && m.size == 0 {
		return nil
	}
	return m.p.withQuota(func(fs *quota.FS) error {
		why, err := m.unlimited(fs, made)
		if err != nil || why != "" {
			if why != "" && m.size != 0 {
				m.warn(why)
			}
			return err
		}
		limit := quota.Limit{Bytes: m.size}
		if limit.Bytes == 0 {
			limit.Bytes = noLimit
		}
		if limit.Bytes == made.Bytes {
			return nil
		}
		if err := fs.Set(made.ID, limit); err != nil {
			return err
		}
		made.Bytes = limit.Bytes
		return m.p.save(m.key, made)
	})
}

// unlimited says why nothing limits a directory; empty if it is limited.
func (m *mounter) unlimited(fs *quota.FS, made *record) (why string, err error) {
	switch {
	case fs.Kind() == quota.None:
		return fs.Why(), nil
	case made.ID == 0:
		return "the volume was made while nothing limited directories: make the pod anew", nil
	case made.Kind != fs.Kind():
		return fmt.Sprintf("the volume's limit is a %s, the filesystem has %s now: make the pod anew", made.Kind, fs.Kind()), nil
	}
	dir, err := os.Open(m.path)
	if err != nil {
		return "", err
	}
	defer dir.Close()
	has, err := fs.Has(dir, made.ID)
	if err == nil && !has {
		why = "the directory was copied, or somebody in the pod has taken it out of its limit: make the pod anew"
	}
	return why, err
}

// freeing is how long an ID that is not on record is waited for. If it is not given back by
// then it stays unused.
const freeing = 10 * time.Second

// removeDisk removes the directory, and gives its ID back. The ID is on record before the
// directory goes, unless there is no room for that.
func (v *volume) removeDisk(ctx context.Context) error {
	above, err := os.Open(filepath.Dir(v.path))
	if err == nil {
		defer above.Close()
		err = v.p.withQuota(func(fs *quota.FS) error { return v.removeIn(ctx, fs, above) })
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := v.p.forget(v.key); err != nil {
		return err
	}
	v.p.sweep()
	return nil
}

func (v *volume) removeIn(ctx context.Context, fs *quota.FS, above *os.File) error {
	name := filepath.Base(v.path)
	info, err := os.Lstat(v.path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return tree.Remove(ctx, above, name)
	}
	unnoted, err := v.noteID(fs)
	if err != nil {
		return err
	}
	done, err := fs.RemoveDir(above, name)
	if err == nil && !done {
		err = tree.Remove(ctx, above, name)
	}
	if err != nil || unnoted == 0 {
		return err
	}
	return retry.For(ctx, freeing, func() (bool, error) {
		err := fs.Release(unnoted)
		return errors.Is(err, quota.ErrBusy), err
	})
}

// noteID writes down the ID of a directory that has none on record: a call was cut off.
// What there is no room for is returned: a pod is not kept from going by a full disk.
func (v *volume) noteID(fs *quota.FS) (unnoted uint64, err error) {
	if r, err := v.p.load(v.key); err != nil || r != nil {
		return 0, err
	}
	dir, err := os.Open(v.path)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	id, err := fs.ID(dir)
	if err != nil || id == 0 {
		return 0, err
	}
	err = v.p.save(v.key, &record{Kind: fs.Kind(), ID: id})
	if errors.Is(err, syscall.ENOSPC) {
		return id, nil
	}
	return 0, err
}
