package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/blakesmith/ar"
	"github.com/ulikunitz/xz"
)

// member returns the tar archive control.tar.xz or data.tar.xz of a .deb file (deb(5)).
func member(deb []byte, name string) (*tar.Reader, error) {
	archive := ar.NewReader(bytes.NewReader(deb))
	for {
		header, err := archive.Next()
		if err != nil {
			return nil, fmt.Errorf("%s of the .deb file: %w", name, err)
		}
		if strings.TrimSuffix(header.Name, "/") != name {
			continue
		}
		r, err := xz.NewReader(archive)
		if err != nil {
			return nil, fmt.Errorf("%s of the .deb file: %w", name, err)
		}
		return tar.NewReader(r), nil
	}
}

// control returns the control file of a .deb file, which describes the package (deb-control(5)).
func control(deb []byte) ([]byte, error) {
	archive, err := member(deb, "control.tar.xz")
	if err != nil {
		return nil, err
	}
	for {
		header, err := archive.Next()
		if err != nil {
			return nil, fmt.Errorf("the control file of the .deb file: %w", err)
		}
		if strings.TrimPrefix(header.Name, "./") == "control" {
			return io.ReadAll(archive)
		}
	}
}

// unpack adds the files and symbolic links of a .deb file to a tree.
func (t tree) unpack(deb []byte, pkg string) error {
	archive, err := member(deb, "data.tar.xz")
	if err != nil {
		return err
	}
	for {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		e := &entry{pkg: pkg}
		switch header.Typeflag {
		case tar.TypeReg:
			e.mode = header.Mode & 0o755
			e.data, err = io.ReadAll(archive)
		case tar.TypeLink:
			target := t[merged(header.Linkname)]
			if target == nil {
				return fmt.Errorf("%s is a hard link to %s, which the package does not contain before it", header.Name, header.Linkname)
			}
			*e = *target
		case tar.TypeSymlink:
			e.link = header.Linkname
		default:
			continue
		}
		if err != nil {
			return err
		}
		t[merged(header.Name)] = e
	}
}
