#!/bin/sh
# Makes $1/chromium start a Chromium: the one on PATH, else a headless one from npm, installed into $1 with no root.
# Libraries (NSS) and a font come with it; the launcher uses them only where the machine has none.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$1"
mkdir -p "$1"
for name in chromium chromium-browser google-chrome; do
    if found=$(command -v "$name"); then
        ln -s "$found" "$1/chromium"
        exit
    fi
done
folder=$(cd "$1" && pwd)
cp "$here"/package*.json "$folder"
npm ci --silent --ignore-scripts --no-audit --no-fund --prefix "$folder"
# With this variable the package unpacks the libraries as well.
(cd "$folder" && mkdir unpacked && AWS_EXECUTION_ENV=AWS_Lambda_nodejs20.x TMPDIR="$folder/unpacked" \
    node --input-type=module --eval 'import chromium from "@sparticuz/chromium"; await chromium.executablePath()')
rm -r "$folder/node_modules"
cat >"$folder/unpacked/fonts.conf" <<FONTS
<?xml version="1.0"?>
<fontconfig><dir>/usr/share/fonts</dir><dir>$folder/unpacked/fonts</dir><cachedir>$folder/unpacked/cache</cachedir></fontconfig>
FONTS
libraries=
ldd "$folder/unpacked/chromium" | grep -q 'not found' && libraries="LD_LIBRARY_PATH=$folder/unpacked/al2023/lib"
cat >"$folder/chromium" <<LAUNCHER
#!/bin/sh
exec env $libraries FONTCONFIG_FILE="$folder/unpacked/fonts.conf" "$folder/unpacked/chromium" "\$@"
LAUNCHER
chmod +x "$folder/chromium"
