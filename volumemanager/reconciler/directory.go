package reconciler

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/state"
	"github.com/trivet-csi/trivet/volumemanager/subpath"
)

// directory is a pod's, which is or is about to be.
func (r *Reconciler) directory(pod types.UID) *state.PodDirectory {
	d := r.actual.Pods[pod]
	if d == nil {
		d = &state.PodDirectory{}
		r.actual.Pods[pod] = d
	}
	return d
}

// removeDirectories removes those of pods that are not wanted and have no volumes.
func (r *Reconciler) removeDirectories() {
	if !r.desired.Complete {
		return
	}
	gone := map[types.UID]*state.PodDirectory{}
	for uid, d := range r.actual.Pods {
		if r.desired.Pods[uid] == nil && !d.Busy {
			gone[uid] = d
		}
	}
	if len(gone) == 0 {
		return
	}
	for id := range r.actual.Mounts {
		delete(gone, id.Pod)
	}
	for uid, d := range gone {
		r.removeDirectory(uid, d)
	}
}

func (r *Reconciler) removeDirectory(pod types.UID, d *state.PodDirectory) {
	r.start(work{
		key: "pod " + string(pod), busy: &d.Busy, progress: &d.Progress, during: state.Unmounting, failed: state.Failed,
		object: "pod " + string(pod), reason: "FailedRemoveDirectory",
		Operation: operation.Operation{Name: "pod_clean", Routine: true, Do: func(context.Context) error {
			if err := r.removeDirectoryNow(pod); err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			delete(r.actual.Pods, pod)
			return nil
		}},
	})
}

func (r *Reconciler) removeDirectoryNow(pod types.UID) error {
	dir := r.paths.Pod(pod)
	// Parts of volumes that have no directory of their own: hostPath.
	parts, err := below(filepath.Join(dir, "volume-subpaths"), 3)
	if err != nil {
		return err
	}
	for _, p := range parts {
		if err := subpath.Unbind(p.path); err != nil {
			return err
		}
	}
	for _, part := range []struct {
		name  string
		depth int
	}{{"volumes", 1}, {"volumeDevices", 1}, {"volume-subpaths", 2}, {"plugins", 2}, {"", 0}} {
		if err := removeEmpty(filepath.Join(dir, part.name), part.depth); err != nil {
			return err
		}
	}
	return nil
}

// entry is what a directory has. Its type is the directory's to tell: what is mounted
// there may be of a server that is dead, and is not asked.
type entry struct {
	path string
	fs.DirEntry
}

// below is what is so many directories below dir. Links are not followed.
func below(dir string, depth int) (found []entry, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case depth == 1:
			found = append(found, entry{path, e})
		case e.IsDir():
			further, err := below(path, depth-1)
			if err != nil {
				return nil, err
			}
			found = append(found, further...)
		}
	}
	return found, err
}

// removeEmpty removes a directory and those in it, so many levels deep, if all of them are
// empty. Of a file or a mount nothing is removed.
func removeEmpty(dir string, depth int) error {
	for ; depth > 0; depth-- {
		found, err := below(dir, depth)
		if err != nil {
			return err
		}
		for _, p := range found {
			if err := removeDir(p.path); err != nil {
				return err
			}
		}
	}
	return removeDir(dir)
}

// removeDir is rmdir(2), of what may be gone already.
func removeDir(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && info.IsDir() {
		err = os.Remove(dir)
	} else if err == nil {
		err = errors.New("it is no directory")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("left of a pod that is gone: %s: %w: look at what is there, and remove it by hand", dir, err)
	}
	return nil
}
