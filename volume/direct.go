package volume

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path"
	"regexp"
	"strings"
)

// directMark precedes the server and the share in the name of a direct pool. The names of
// configured pools do not contain it.
const directMark = "="

var (
	// directEscaped matches the characters that escape replaces.
	directEscaped = regexp.MustCompile(`[^A-Za-z0-9._/-]`)
	hostPattern   = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?$`)
)

// DirectPool returns the name of a direct pool: an export that a StorageClass specifies by server and
// share, and that is not in the configuration. Each export has exactly one name. DirectPool returns
// ErrInvalid for an invalid server or share.
func DirectPool(server, share string) (string, error) {
	server, err := CanonicalServer(server)
	if err != nil {
		return "", Errorf(ErrInvalid, "parameter %s%w", ParamServer, err)
	}
	if share, err = CanonicalExport(share); err != nil {
		return "", Errorf(ErrInvalid, "parameter %s%w", ParamShare, err)
	}
	return directMark + escape(server) + directMark + escape(share), nil
}

// ParseDirectPool is the inverse of DirectPool. ok is false for the name of any other pool.
func ParseDirectPool(name string) (server, share string, ok bool) {
	rest, direct := strings.CutPrefix(name, directMark)
	server, share, divided := strings.Cut(rest, directMark)
	if !direct || !divided {
		return "", "", false
	}
	server, badServer := url.PathUnescape(server)
	share, badShare := url.PathUnescape(share)
	again, err := DirectPool(server, share)
	return server, share, errors.Join(badServer, badShare, err) == nil && again == name
}

// IsDirectPool reports whether a pool's name is that of a direct pool.
func IsDirectPool(name string) bool {
	_, _, ok := ParseDirectPool(name)
	return ok
}

// escape replaces each byte of the characters that directEscaped matches by %xx.
func escape(s string) string {
	return directEscaped.ReplaceAllStringFunc(s, func(c string) string {
		return "%" + strings.ReplaceAll(fmt.Sprintf("% x", c), " ", "%")
	})
}

// CanonicalServer returns a server's name or address in lower case, an IPv6 address without brackets.
// The text of the error (ErrInvalid) begins with ="value", so that callers prepend the name of the
// parameter.
func CanonicalServer(s string) (string, error) {
	bare := s
	if inner, ok := strings.CutPrefix(s, "["); ok {
		bare, ok = strings.CutSuffix(inner, "]")
		if !ok {
			return "", Errorf(ErrInvalid, "=%q: the bracket is not closed", s)
		}
	}
	if a, err := netip.ParseAddr(bare); err == nil {
		return a.String(), nil
	}
	if bare != s || !hostPattern.MatchString(s) {
		return "", Errorf(ErrInvalid, "=%q: expected a host name, an IPv4 or an IPv6 address, without a path or a port", s)
	}
	return strings.ToLower(s), nil
}

// CanonicalExport returns the clean form of an export's absolute path. The error is as with
// CanonicalServer.
func CanonicalExport(s string) (string, error) {
	switch {
	case !strings.HasPrefix(s, "/"):
		return "", Errorf(ErrInvalid, "=%q: expected the export's absolute path on the server, such as /%s", s, strings.TrimPrefix(s, "/"))
	case path.Clean(s) != strings.TrimRight(s, "/") && s != "/":
		return "", Errorf(ErrInvalid, "=%q: expected a path without . and .. and empty parts", s)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "", Errorf(ErrInvalid, "=%q: expected a path without control characters", s)
	}
	return path.Clean(s), nil
}

// Attribute returns a value of a volume context that an administrator wrote, or an empty string if there is
// none. The case of the key does not matter, as in csi-driver-nfs: otherwise a PersistentVolume that was
// written for that driver with the key subdir would mount the whole share.
func Attribute(context map[string]string, key string) string {
	if value, exact := context[key]; exact {
		return value
	}
	for k, value := range context {
		if strings.EqualFold(k, key) {
			return value
		}
	}
	return ""
}

// Share returns the path of an export from parameters or a volume context: the value of share or of its
// synonym export. It returns an empty string if neither is set, and ErrInvalid if both are set and differ.
func Share(in map[string]string) (string, error) {
	share, export := Attribute(in, ParamShare), Attribute(in, ParamExport)
	if share != "" && export != "" && share != export {
		return "", Errorf(ErrInvalid, "%s=%q and %s=%q are two names of one parameter and differ: remove one", ParamShare, share, ParamExport, export)
	}
	return cmp.Or(share, export), nil
}
