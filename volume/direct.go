package volume

import (
	"cmp"
	"fmt"
	"net/netip"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// directMark begins and divides the name of a direct pool; no pool of a
// configuration has it in its name.
const directMark = "="

var (
	directPlain  = regexp.MustCompile(`[^A-Za-z0-9._/-]`)
	directEscape = regexp.MustCompile(`%[0-9a-f]{2}`)
	hostPattern  = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?$`)
)

// DirectPool is what stands for an export in IDs where no configuration names it:
// a StorageClass gave server and share. It can be taken apart again, and one export
// has one form. ErrInvalid for what is no server or no share.
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

// ParseDirectPool is the inverse of DirectPool; ok is false for the name of any
// other pool.
func ParseDirectPool(name string) (server, share string, ok bool) {
	rest, direct := strings.CutPrefix(name, directMark)
	server, share, divided := strings.Cut(rest, directMark)
	if !direct || !divided {
		return "", "", false
	}
	server, share = unescape(server), unescape(share)
	again, err := DirectPool(server, share)
	return server, share, err == nil && again == name
}

func escape(s string) string {
	return directPlain.ReplaceAllStringFunc(s, func(c string) string {
		var b strings.Builder
		for _, one := range []byte(c) {
			fmt.Fprintf(&b, "%%%02x", one)
		}
		return b.String()
	})
}

func unescape(s string) string {
	return directEscape.ReplaceAllStringFunc(s, func(c string) string {
		n, _ := strconv.ParseUint(c[1:], 16, 8) // the pattern has made sure
		return string([]byte{byte(n)})
	})
}

// CanonicalServer is one form of a server's name or address: lower case, an IPv6
// address without brackets. The error (ErrInvalid) begins with the value.
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
		return "", Errorf(ErrInvalid, "=%q: want a host name, an IPv4 or an IPv6 address, without a path or a port", s)
	}
	return strings.ToLower(s), nil
}

// CanonicalExport is one form of an export's path: absolute and clean. The error
// (ErrInvalid) begins with the value.
func CanonicalExport(s string) (string, error) {
	switch {
	case !strings.HasPrefix(s, "/"):
		return "", Errorf(ErrInvalid, "=%q: want the export's absolute path on the server, such as /%s", s, strings.TrimPrefix(s, "/"))
	case path.Clean(s) != strings.TrimRight(s, "/") && s != "/":
		return "", Errorf(ErrInvalid, "=%q: want a path without . and .. and empty parts", s)
	case strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return "", Errorf(ErrInvalid, "=%q: want a path without control characters", s)
	}
	return path.Clean(s), nil
}

// Attribute is a value of a volume context that an administrator wrote; empty if there
// is none. Keys are taken in any case, as csi-driver-nfs takes and writes them: who
// re-points its volumes must not get all of a share in place of a directory.
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

// Share is the path on a server in parameters or a volume context: as share or as
// export; empty if there is none. ErrInvalid if both are given and differ.
func Share(in map[string]string) (string, error) {
	share, export := Attribute(in, ParamShare), Attribute(in, ParamExport)
	if share != "" && export != "" && share != export {
		return "", Errorf(ErrInvalid, "%s=%q and %s=%q name the same path: remove one", ParamShare, share, ParamExport, export)
	}
	return cmp.Or(share, export), nil
}
