package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// maxPackage is the maximum size of a .deb file in bytes.
const maxPackage = 64 << 20

// fetch returns the .deb file of a package from the user's cache directory, or downloads it.
func (l *lock) fetch(ctx context.Context, p Package) ([]byte, error) {
	caches, err := os.UserCacheDir()
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(caches, "trivet-packages")
	cached := filepath.Join(dir, p.SHA256+".deb")
	if data, err := os.ReadFile(cached); err == nil && p.verify(data) == nil {
		return data, nil
	}
	data, err := l.download(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("package %s of %s: %w", p.Name, p.Arch, err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	return data, writeFile(cached, data)
}

// writeFile replaces a file, so that other processes never read a part of it.
func writeFile(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), "new-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// download tries the archive, which removes packages when newer versions replace them, and then
// snapshot.debian.org, which has all versions.
func (l *lock) download(ctx context.Context, p Package) ([]byte, error) {
	var errs []error
	for _, url := range []string{p.URL, l.snapshotURL(p)} {
		data, err := get(ctx, url)
		if err == nil {
			err = p.verify(data)
		}
		if err == nil {
			return data, nil
		}
		errs = append(errs, fmt.Errorf("%s: %w", url, err))
	}
	return nil, errors.Join(errs...)
}

// snapshotURL returns https://snapshot.debian.org/archive/ARCHIVE/TIME/PATH for
// https://deb.debian.org/ARCHIVE/PATH.
func (l *lock) snapshotURL(p Package) string {
	archive, path, _ := strings.Cut(strings.TrimPrefix(p.URL, "https://deb.debian.org/"), "/")
	return "https://snapshot.debian.org/archive/" + archive + "/" + l.snapshot + "/" + path
}

func get(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return nil, errors.New(response.Status)
	}
	return io.ReadAll(io.LimitReader(response.Body, maxPackage))
}

// verify compares the digest of a .deb file with that of the lock file.
func (p Package) verify(data []byte) error {
	sum := sha256.Sum256(data)
	if got := hex.EncodeToString(sum[:]); got != p.SHA256 {
		return fmt.Errorf("the file has the SHA-256 %s, but packages.lock has %s", got, p.SHA256)
	}
	return nil
}
